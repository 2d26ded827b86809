"""The page of the experiments is what the committed figures say."""

from experiments import report


def test_the_page_is_up_to_date(capsys):
    assert report.main(['--check']) == 0, capsys.readouterr().err


def test_guessing():
    """One value left is known; of two, the first answer is right half of the time and the second always."""
    assert report.guessing(1) == 1
    assert report.guessing(2) == (1 + 1.5) / 3


def test_ablations_are_differences_by_seed():
    mixers = dict(zip(['diagonal', 'scalar beta', 'exact', 'diagonal, normalised keys', 'exact, normalised keys'],
                      [0.5, 0.25, 0.75, 0.5, 1], strict=True))
    seeds = {0: 0, 1: 0.125}
    recalls = {'runs': [
        {'cell': {'mixer': mixer, 'seed': seed, 'seq_len': 32, 'hidden_size': 8}, 'history': [(1, 0)],
         'recall': x + more * (mixer == 'exact')} for mixer, x in mixers.items() for seed, more in seeds.items()
    ]}
    losses = {'setting': {'block_size': 16}, 'runs': [
        {'model': f'Longhorn, {mixer}', 'seed': seed, 'loss': x} for mixer, x in mixers.items() for seed in seeds
    ]}
    long = {'block_size': 16, 'runs': [
        run | {'spans': [{'end': 16, 'loss': 9}, {'end': 64, 'loss': 2 * run['loss']}]} for run in losses['runs']
    ]}
    lines = report.ablations(recalls, losses, long).split('\n\n')[2].splitlines()
    assert lines[0] == '| change | recall, 32 tokens, width 8 | loss, 16 tokens | loss, up to 64 tokens |'
    assert lines[2].split(' | ')[1:3] == ['-25.0 (-25.0 to -25.0)', '-0.2500 (-0.2500 to -0.2500)']
    assert lines[3].split(' | ')[1] == '+31.2 (+25.0 to +37.5)'
    assert lines[5].split(' | ')[1::2] == ['+18.8 (+12.5 to +25.0)', '+0.5000 (+0.5000 to +0.5000) |']
