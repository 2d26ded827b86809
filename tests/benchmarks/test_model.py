"""The models' benchmark: every model has a row, what runs has all figures, and what can't says why."""

import json
import sys
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure import timing
from benchmarks.models import generation, registry, variants
from benchmarks.models import run as model
from benchmarks.report.models import models as page

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
    return report, {row['model']: row for row in report['rows']}


def build(name, size=SIZE):
    torch.manual_seed(0)
    return ROWS[name].build(ROWS[name].config(size)).eval()


def test_rows(tmp_path):
    plot = tmp_path / 'model.png'
    report, rows = run(tmp_path, '--batches', '1', '2', '--plot', str(plot))
    assert list(rows) == [row.name for row in model.MODELS]
    assert {name for name, row in rows.items() if row['status'] != 'ok'} == set(TRITON)
    for name in TRITON:
        assert rows[name]['status'] == 'not run' and 'GPU' in rows[name]['reason']
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
    assert plot.read_bytes().startswith(b'\x89PNG')
    text = page(report)
    assert '| GPT-2 | ' in text and 'float32, batch 1' in text and '| Mamba2 | ' not in text


@pytest.mark.parametrize('name', [name for name in ROWS if name not in TRITON])
def test_a_stream_is_what_generate_gives(name):
    running = generation.System(ROWS[name], variants.Variant(), build(name))
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


def test_parameters_at_the_papers_size():
    """Equal within a tenth, GPT-2's positions apart."""
    size = registry.SIZES['120m']
    counts = {}
    for name in ('Longhorn', 'GPT-2', 'Llama', "transformers' Mamba", "transformers' Mamba2"):
        with torch.device('meta'):
            built = ROWS[name].build(ROWS[name].config(size))
        counts[name] = sum(x.numel() for x in built.parameters())
    assert size.positions > max(size.prompts)
    counts['GPT-2'] -= size.positions * size.hidden_size
    assert max(counts.values()) / min(counts.values()) < 1.1, counts


def test_models_take_turns():
    order = []

    def tokens(name):
        while True:
            order.append(name)
            yield

    times = generation.decode_in_turns({'a': tokens('a'), 'b': tokens('b')}, 8, torch.device('cpu'), {})
    assert order == list('aabb' * generation.TURNS)
    assert [len(x) for x in times.values()] == [8, 8]
    order.clear()
    runs = {name: partial(order.append, name) for name in 'ab'}
    assert {name: len(x) for name, x in timing.take_turns(runs, torch.device('cpu'), 0).items()} == {'a': 3, 'b': 3}
    assert order == list('ababab')


def test_what_fails_stops_no_other():
    def tokens(count):
        yield from range(count)

    errors = {}
    times = generation.decode_in_turns({'a': tokens(1), 'b': tokens(8)}, 8, torch.device('cpu'), errors)
    assert list(errors) == ['a'] and len(times['b']) == 8
    errors.clear()

    def broken():
        raise OSError('no')

    times = timing.take_turns({'a': broken, 'b': str}, torch.device('cpu'), 0, errors)
    assert errors == {'a': 'OSError: no'} and len(times['b']) == 3
    with pytest.raises(OSError, match='no'):
        timing.take_turns({'a': broken}, torch.device('cpu'), 0)


def test_not_run_and_compare(tmp_path, capsys, monkeypatch):
    def broken(size):
        raise ImportError('needs something else')

    monkeypatch.setattr(model, 'MODELS', (model.MODELS[0], model.Row('broken', broken)))
    _, rows = run(tmp_path)
    assert rows['broken'] == {'model': 'broken', 'status': 'not run', 'reason': 'ImportError: needs something else'}
    capsys.readouterr()
    model.main([*TINY, '--compare', str(tmp_path / 'model.json')])
    out = capsys.readouterr().out
    assert 'broken' in out and 'needs something else' in out
    assert 'Longhorn, training step:' in out and '3 times in both' in out
    assert 'Longhorn, float32, batch 1, token after 16:' in out


def test_dtypes_and_long_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(model, 'MODELS', model.MODELS[:1])
    # judged by the prompt of 8 tokens, 16 million of them are too many
    report, rows = run(tmp_path, '--skip_training', '--dtypes', 'float32', 'bfloat16', '--prompts', '8', str(2**24))
    row = rows['Longhorn']
    assert 'training' not in row and row['status'] == 'ok'
    assert [(x['dtype'], x['prompt']) for x in row['generation']] == [('float32', 8), ('bfloat16', 8)]
    full, half = (x['weight_bytes'] for x in row['generation'])
    assert full == 2 * half
    assert [(x['dtype'], x['prompt']) for x in row['left_out']] == [('float32', 2**24), ('bfloat16', 2**24)]
    assert all('judged by the one before' in x['reason'] for x in row['left_out'])
    text = page(report)
    assert text.startswith('## Generation on a CPU')


def test_compiled_steps(tmp_path, monkeypatch):
    """Rows of their own, with the time of their first tokens; Inductor is left out, for it takes half a minute a model."""
    whole = torch.compile
    monkeypatch.setattr(variants.torch, 'compile', lambda function, mode: whole(function, mode=mode, backend='eager'))
    report, rows = run(tmp_path, '--skip_training', '--compile', '--models', 'Longhorn, exact', 'GPT-2')
    assert list(rows) == ['Longhorn, exact', 'Longhorn, exact, compiled', 'GPT-2', 'GPT-2, compiled']
    for name, row in rows.items():
        assert row['status'] == 'ok'
        assert all(('warm_up_s' in x) == name.endswith('compiled') for x in row['generation'])
    # a static cache has its last length from the start
    length = 8 + registry.WARM + 2 - 1
    assert rows['GPT-2, compiled']['generation'][0]['state_bytes'] >= length * 2 * 32 * 4


def test_without_a_compiler(tmp_path, monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, 'cxx', (None, 'no-such-compiler'))
    _, rows = run(tmp_path, '--skip_training', '--compile', '--models', 'GPT-2')
    assert rows['GPT-2']['status'] == 'ok'
    assert rows['GPT-2, compiled']['status'] == 'not run' and 'ompiler' in rows['GPT-2, compiled']['reason']


def test_without_torchao(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torchao', None)
    monkeypatch.setitem(sys.modules, 'torchao.quantization', None)
    _, rows = run(tmp_path, '--skip_training', '--int8', '--models', 'Longhorn, exact')
    assert rows['Longhorn, exact']['status'] == 'ok'
    assert rows['Longhorn, exact, int8']['status'] == 'not run' and 'torchao' in rows['Longhorn, exact, int8']['reason']


def test_int8_is_a_copy(monkeypatch):
    """What torchao does to the model is not done to the one in floating point."""
    def quantize_(model, config):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)

    fake = SimpleNamespace(quantize_=quantize_, Int8WeightOnlyConfig=object)
    monkeypatch.setitem(sys.modules, 'torchao', SimpleNamespace(quantization=fake))
    monkeypatch.setitem(sys.modules, 'torchao.quantization', fake)
    plain = build('Longhorn')
    chosen = variants.variants(compiled=True, int8=True)
    assert [x.suffix for x in chosen] == ['', ', int8', ', compiled', ', int8 compiled']
    copies = [generation.System(ROWS['Longhorn'], variant, plain).model for variant in chosen]
    assert [x.lm_head.weight.dtype for x in copies] == [torch.float32, torch.int8, torch.float32, torch.int8]
    assert copies[0] is copies[2] is plain and copies[1] is not plain


def test_compiling_too_often_is_an_error():
    with variants.compiling():
        assert torch._dynamo.config.fail_on_recompile_limit_hit
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


def test_bytes_are_counted_once():
    x, y = torch.zeros(3, 5), torch.zeros(2, dtype=torch.int8)
    assert generation.tensor_bytes({'a': [x, (x, 2, None)], 'b': SimpleNamespace(state=y)}) == 62
