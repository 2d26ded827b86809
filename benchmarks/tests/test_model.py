"""The models' benchmark: every model has a row, what runs has all figures, and what can't says why."""

import json
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.measure import timing
from benchmarks.models import generation, registry
from benchmarks.models import run as model
from fla_longhorn.models import LonghornConfig, LonghornForCausalLM
from fla_longhorn.ops import backends
from tests.pages import blocks

PAGE = Path(__file__).parents[2] / 'docs/models.md'

TINY = [
    '--device', 'cpu', '--hidden_size', '32', '--blocks', '1', '--batch_size', '1', '--seq_len', '16', '--prompts', '8', '16',
    '--batches', '1', '--new_tokens', '2', '--seconds', '0',
]
SIZE = registry.Size(32, 1, 32, 100, 1, 16, (1, 2), (8, 16), 4)
# rows that need a GPU
TRITON = ('GLA', 'DeltaNet', 'Mamba2')
ROWS = {row.name: row for row in registry.MODELS}


def run(tmp_path, *arguments):
    path = tmp_path / 'model.json'
    model.main([*TINY, *arguments, '--json', str(path)])
    report = json.loads(path.read_text())
    return {row['model']: row for row in report['rows']}


def build(name, size=SIZE):
    torch.manual_seed(0)
    return ROWS[name].build(ROWS[name].config(size)).eval()


def test_rows(tmp_path):
    rows = run(tmp_path, '--batches', '1', '2')
    assert list(rows) == [row.name for row in model.MODELS]
    assert {name for name, row in rows.items() if row['status'] != 'ok'} == set(TRITON)
    assert all('GPU' in rows[name]['reason'] for name in TRITON)
    ran = {name: row for name, row in rows.items() if row['status'] == 'ok'}
    for row in ran.values():
        assert row['parameters'] > 0 and row['training']['tokens_per_s'] > 0
        assert [(x['batch'], x['prompt']) for x in row['generation']] == [(1, 8), (1, 16), (2, 8), (2, 16)]
        for x in row['generation']:
            assert x['dtype'] == 'float32' and x['token']['repeats'] == 2 and x['first']['repeats'] >= 1
            assert x['first']['ms'] > 0 and x['token']['ms_low'] <= x['token']['ms'] <= x['token']['ms_high']
            assert x['weight_bytes'] >= 4 * row['parameters']

    def states(name):
        return [x['state_bytes'] for x in ran[name]['generation']]

    for name in ('Longhorn', 'Longhorn, exact', "transformers' Mamba", "transformers' Mamba2"):
        one, longer, two, last = states(name)
        assert one == longer > 0 and two == last == 2 * one
    for name in ('GPT-2', 'Llama', 'Transformer'):
        one, longer, two, last = states(name)
        # keys and values of width 32 for each token, of one layer
        assert longer - one == 8 * 2 * 32 * 4 and two == 2 * one and last == 2 * longer


@pytest.mark.parametrize('name', [name for name in ROWS if name not in TRITON])
def test_a_stream_is_what_generate_gives(name):
    running = generation.System(name, build(name))
    # else most models repeat one token
    with torch.no_grad():
        for weight in running.model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(weight.numel()))
    ids = registry.random_tokens(SIZE, 2, 8, torch.device('cpu'))
    expected = running.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    tokens = torch.stack([tokens for tokens, _ in islice(generation.stream(running, ids, 6), 6)], 1)
    assert torch.equal(tokens, expected[:, 8:])
    assert len(set(tokens.flatten().tolist())) > 2


def test_runs_take_turns():
    order, errors = [], {}

    def broken():
        raise OSError('no')

    runs = {name: partial(order.append, name) for name in 'ab'}
    times = timing.take_turns({**runs, 'c': broken}, torch.device('cpu'), 0, errors)
    assert [len(times[x]) for x in 'ab'] == [3, 3] and order == list('ababab') and errors == {'c': 'OSError: no'}
    with pytest.raises(OSError, match='no'):
        timing.take_turns({'a': broken}, torch.device('cpu'), 0)


def by_the_documentation(model):
    lines, = (x for x in blocks(PAGE, 'python') if '.mT.contiguous().mT' in x)
    exec(lines, {'torch': torch, 'model': model})
    return model


@pytest.mark.parametrize('gate', [None, 'head', 'channel'])
def test_weights_by_columns_keep_the_loop_for_a_token(gate, monkeypatch):
    found = []
    loops = backends.loops.of_token()
    mix = loops.mix_layer
    monkeypatch.setattr(loops, 'mix_layer', lambda *args: found.append(mix(*args)) or found[-1])
    config = LonghornConfig(hidden_size=32, num_hidden_layers=1, vocab_size=40, exact=True, gate=gate, eos_token_id=None)
    changed = by_the_documentation(LonghornForCausalLM(config))
    assert not changed.model.layers[0].attn.in_proj.weight.is_contiguous()
    changed.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=3, do_sample=False)
    assert len(found) == 2 and all(o is not None for o in found)
