import fla_longhorn
from benchmarks.command import run

COMMANDS = {
    name: f'lab.experiments.{name}' for name in (
        'mqar', 'language_modeling', 'extrapolation', 'perplexity', 'plain', 'objectives', 'needle', 'state_dtypes',
    )
}

if __name__ == '__main__':
    # fla's Transformer is among the models
    fla_longhorn.patch(flash_attn=True)
    raise SystemExit(run('experiments', COMMANDS))
