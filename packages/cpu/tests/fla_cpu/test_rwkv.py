import pytest
import torch
import torch.nn.functional as F
from fla.modules.activations import sqrelu
from fla.modules.token_shift import token_shift

from fla_cpu import rwkv
from tests.reference import compare, tensor


def shift(x, cu_seqlens=None, cache=None):
    """`x[t - 1] - x[t]` of every sequence after its cache, and the last tokens."""
    rows = x.flatten(0, 1)
    bounds = range(0, len(rows) + 1, x.shape[1]) if cu_seqlens is None else cu_seqlens.tolist()
    outputs, last = [], []
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        past = torch.zeros_like(rows[:1]) if cache is None else cache[i:i + 1]
        stream = torch.cat([past, rows[start:end]])
        outputs.append(stream[:-1] - stream[1:])
        last.append(stream[-1])
    return torch.cat(outputs).view_as(x), torch.stack(last)


@pytest.mark.parametrize('cached', [False, True])
@pytest.mark.parametrize(('shape', 'bounds'), [((2, 5, 3), None), ((3, 1, 4), None), ((1, 9, 3), [0, 4, 5, 9])])
def test_token_shift(shape, bounds, cached):
    torch.manual_seed(0)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    N = shape[0] if bounds is None else len(bounds) - 1
    inputs = dict(x=tensor(*shape), cache=tensor(N, shape[-1]) if cached else None)
    compare(
        lambda x, cache: token_shift(x, cu_seqlens, cache=cache, output_cache=True),
        lambda x, cache: shift(x, cu_seqlens, cache), inputs, torch.float32,
    )
    assert torch.equal(token_shift(inputs['x'], cu_seqlens), shift(inputs['x'], cu_seqlens)[0])


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_sqrelu(dtype):
    torch.manual_seed(0)
    compare(lambda x: (sqrelu(x),), lambda x: (F.relu(x).square(),), dict(x=tensor(7, 5, dtype=dtype)), dtype)


def test_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setenv('FLA_CPU', '0')
    monkeypatch.setattr(rwkv, '_shift_forward', lambda *args: args)
    x = torch.ones(1, 2, 3)
    assert rwkv.token_shift_fwd(x) == (x, None, None, False, None)
