"""The command, the folder that it writes, and its program without torch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fla_longhorn import LonghornForCausalLM
from fla_longhorn_extras.onnx.__main__ import main
from fla_longhorn_extras.onnx.export import export_onnx
from fla_longhorn_extras.onnx.generate import Model, generate
from fla_longhorn_extras.onnx.generate import main as generate_main
from packages.extras.tests.onnx.test_model import build
from tests import forks
from tests.integration.swapped import make_model
from tests.models.test_longhorn import small

WORDS = ['one', 'two', 'three', *(f'word{i}' for i in range(50))]
# lets a program in another folder import what this one can
PATHS = os.pathsep.join(map(os.path.abspath, [forks.ROOT, *os.environ.get('PYTHONPATH', '').split(os.pathsep)]))
# a module of None fails to be imported
WITHOUT = '''
import runpy, sys
sys.modules.update(dict.fromkeys(['torch', 'transformers', 'fla', 'fla_longhorn', 'onnx', 'onnxscript']))
try:
    import torch
except ModuleNotFoundError:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name='__main__')
'''


def run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp('checkpoint')
    build(exact=True, num_hidden_layers=2, tie_word_embeddings=False).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_no_checkpoint(tmp_path, capsys):
    """A path with a mistake in it: a line, not a traceback of the hub's."""
    with pytest.raises(SystemExit):
        main([str(tmp_path / 'nothing here'), '--output_dir', str(tmp_path)])
    assert 'nothing here is neither a folder of a checkpoint' in capsys.readouterr().err


@pytest.fixture(scope='module')
def command(checkpoint, tmp_path_factory):
    """The folder and what the command prints."""
    folder = tmp_path_factory.mktemp('files') / 'new' / 'onnx'
    done = run('-m', 'fla_longhorn_extras.onnx', checkpoint, '--output_dir', folder, '--new_tokens', 20, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_the_files(command, checkpoint):
    folder, said = command
    names = ['generate.py', 'generation_config.json', 'model.onnx', 'model.onnx.data', 'tokenizer.json']
    assert sorted(x.name for x in folder.iterdir()) == names
    assert '20 greedy tokens equal' in said and 'ratio' in said and str(folder / 'model.onnx') in said
    graph = (folder / 'model.onnx').read_bytes()
    # weights are in the other file, and no path of this machine is in either
    parameters = LonghornForCausalLM.from_pretrained(checkpoint).num_parameters()
    assert (folder / 'model.onnx.data').stat().st_size < 4 * parameters * 1.1
    assert len(graph) < 100_000 and b'site-packages' not in graph and str(forks.ROOT).encode() not in graph


@pytest.mark.parametrize('prompts', [['one'], ['three word7 two', 'one']], ids=len)
def test_the_program_without_torch(command, checkpoint, prompts, tmp_path):
    folder, _ = command
    # the program finds its files wherever the folder is
    moved = folder.rename(tmp_path / 'elsewhere')
    try:
        ids = [[WORDS.index(word) for word in prompt.split()] for prompt in prompts]
        done = run('-c', WITHOUT, moved / 'generate.py', *(x for row in ids for x in ('--ids', *row)), '--max_new_tokens', 200)
        assert done.returncode == 0, done.stderr
        got = [[int(x) for x in line.split()] for line in done.stdout.splitlines()]
        text = run('-c', WITHOUT, moved / 'generate.py', *(x for row in prompts for x in ('--prompt', row)), '--seed', 1)
        assert text.returncode == 0, text.stderr
    finally:
        moved.rename(folder)
    model = LonghornForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, tokens in zip(ids, got, strict=True):
        prompt = torch.tensor([prompt])
        # all ones: `generate` takes tokens that are the pad token for padding
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)
        assert tokens == expected[0, prompt.shape[1]:].tolist() and len(set(tokens)) > 3
    lines = text.stdout.splitlines()
    assert [line.split() for line in lines] == [[WORDS[x] for x in row[:100]] for row in got]


def test_the_program_ends_where_the_text_does(command, tmp_path, capsys):
    folder, _ = command
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    arguments = ['--folder', str(tmp_path), '--ids', '3', '4', '--max_new_tokens', '20']

    def run_with(end: object) -> list[str]:
        (tmp_path / 'generation_config.json').unlink()
        (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': end}))
        assert generate_main(arguments) == 0
        return capsys.readouterr().out.split()

    tokens = run_with(None)
    stop = tokens.index(tokens[6]) + 1
    assert len(tokens) == 20 and run_with(int(tokens[6])) == run_with([1000, int(tokens[6])]) == tokens[:stop]
    for words, message in ((['--prompt', 'one', '--ids', '1'], 'give --prompt or --ids'), ([], 'give --prompt or --ids')):
        with pytest.raises(SystemExit):
            generate_main(['--folder', str(tmp_path), *words])
        assert message in capsys.readouterr().err
    (tmp_path / 'tokenizer.json').unlink()
    with pytest.raises(SystemExit):
        generate_main(['--folder', str(tmp_path), '--prompt', 'one'])
    assert 'tokenizer.json; give --ids' in capsys.readouterr().err


def test_end_and_samples(tmp_path):
    torch.manual_seed(1)
    export_onnx(LonghornForCausalLM(small()).eval(), tmp_path)
    graph = Model(tmp_path)
    rows = generate(graph, [[1], [2, 3]], 30)
    ended = generate(graph, [[1], [2, 3]], 30, end=[rows[0][4]])
    for own, row in zip(ended, rows, strict=True):
        stop = row.index(rows[0][4]) + 1 if rows[0][4] in row else 30
        assert own == row[:stop]
    sampled = [generate(graph, [[1]], 30, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]
    # the first token's share is its probability
    logits, _ = graph(np.array([[1]]), graph.new_states(1))
    chances = np.exp(logits[0]) / np.exp(logits[0]).sum()
    firsts = generate(graph, [[1]] * 1000, 1, temperature=1.0, seed=0)
    counts = np.bincount([row[0] for row in firsts], minlength=53) / 1000
    assert np.abs(counts - chances).max() < 5 * np.sqrt(chances.max() / 1000)


def test_bad_calls_of_the_program(command):
    graph = Model(command[0])
    states = graph.new_states(2)
    for message, ids, given in [
        ('at least one a row', np.zeros((2, 0), int), states),
        ('at least one a row', np.zeros((2, 1)), states),
        ('ids must be in 0', np.array([[-1], [0]]), states),
        ('ids must be in 0', np.array([[53], [0]]), states),
        ('states must have the shapes', np.zeros((3, 1), int), states),
        ('states must have the shapes', np.zeros((2, 1), int), states[:1]),
        ('states must have the shapes', np.zeros((2, 1), int), states[::-1]),
    ]:
        with pytest.raises(ValueError, match=message):
            graph(ids, given)
    with pytest.raises(ValueError, match='max_new_tokens'):
        generate(graph, [[1]], 0)
    # there is no padding, so no mask
    with pytest.raises(ValueError, match='attention_mask'):
        graph.session.run(None, {'input_ids': np.zeros((2, 1), int), 'attention_mask': np.ones((2, 1), int)})


def save(folder, **options) -> None:
    LonghornForCausalLM(small(**options)).save_pretrained(folder)


def save_quantised(folder) -> None:
    save(folder)
    config = json.loads((folder / 'config.json').read_text())
    config['quantization_config'] = {'quant_method': 'bitsandbytes', 'load_in_8bit': True}
    (folder / 'config.json').write_text(json.dumps(config))


@pytest.mark.parametrize(('error', 'message', 'make'), [
    (ValueError, 'attn must be None', lambda folder: save(folder, attn={'layers': [1], 'num_heads': 2})),
    (ValueError, 'gate must be None', lambda folder: save(folder, gate='head')),
    (ValueError, 'quantization_config must be None', save_quantised),
    (TypeError, "got one of the type 'gla'", lambda folder: make_model('gla', 'cpu').save_pretrained(folder)),
    (ValueError, 'Unrecognized model', lambda folder: None),
], ids=['attention', 'gate', 'quantised', 'family', 'nothing'])
def test_checkpoints_that_have_no_translation(error, message, make, tmp_path):
    checkpoint, output = tmp_path / 'checkpoint', tmp_path / 'output'
    checkpoint.mkdir()
    make(checkpoint)
    with pytest.raises(error, match=message):
        main([str(checkpoint), '--output_dir', str(output)])
    assert not output.exists()
