"""Norm and convolution of float32 and bfloat16 tensors by the compiled loops: which calls they serve, and their results."""

import pytest
import torch
from fla.modules import RMSNorm
from fla.modules.causal_conv1d import causal_conv1d_update

from fla_cpu import loops
from fla_cpu.backend import load_loops
from fla_kit.numba import launch, threads
from packages.cpu.tests.fla_cpu.test_convolution import LENGTHS, check, inputs_of
from packages.cpu.tests.fla_cpu.test_convolution import run as convolve
from tests.reference import assert_close, norm


@pytest.fixture
def served(monkeypatch):
    """The names of the loops that ran."""
    names = []
    for name in ('rms_norm', 'convolve_token', 'convolve', 'convolve_gradients'):
        function = getattr(loops, name)
        monkeypatch.setattr(loops, name, lambda *args, f=function, n=name: names.append(n) or f(*args))
    return names


def conv_inputs(N=3, D=22, W=4):
    return torch.randn(N, D), torch.randn(N, D, W), torch.randn(D, W), torch.randn(D)


# 2200 rows of 512 entries are shared among threads
@pytest.mark.parametrize(('T', 'D'), [(0, 8), (1, 1), (1, 64), (5, 67), (2200, 512)])
@pytest.mark.parametrize('affine', [False, True])
def test_norm(served, T, D, affine):
    x = torch.randn(T, D)
    layer = RMSNorm(D, elementwise_affine=affine)
    if affine:
        torch.nn.init.normal_(layer.weight)
    # with gradients inside fla's autograd function
    with torch.set_grad_enabled(affine):
        y = layer(x).detach()
    assert served == ['rms_norm'] or T == 0
    weight = layer.weight.double() if affine else None
    assert_close('output', y, norm(x.double(), weight, None, 1e-5, True, 1), 1e-6)


def normalise() -> tuple[torch.Tensor, ...]:
    x, weight, rstd = torch.randn(100, 30), torch.randn(30), torch.empty(100)
    return loops.rms_norm(x, weight, 1e-6, rstd=rstd), rstd


def convolve_both_ways() -> tuple[torch.Tensor, ...]:
    x, weight, bias = torch.randn(2, 70, 272), torch.randn(272, 4), torch.randn(272)
    return loops.convolve(x, weight, bias, None, True), *loops.convolve_gradients(x, x, weight, bias, None, True)


@pytest.mark.parametrize(('function', 'n', 'shared'), [(normalise, 2, [2]), (convolve_both_ways, 3, [3, 3])])
@torch.no_grad()
def test_threads_change_nothing(monkeypatch, function, n, shared):
    monkeypatch.setattr(launch, 'MIN_PARALLEL_STEPS', 0)
    ran, results, run = [], [], threads.run
    monkeypatch.setattr(threads, 'run', lambda loop, n_w, *args: ran.append(n_w) or run(loop, n_w, *args))
    # the first call compiles, on one thread
    for count in (1, n):
        monkeypatch.setattr(torch, 'get_num_threads', lambda count=count: count)
        torch.manual_seed(0)
        results.append(function())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and ran == shared


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('has_bias', [False, True])
@torch.no_grad()
def test_pages_are_the_states_of_single_tokens(dtype, has_bias):
    """The same bits, in strided inputs and pages with a gap: one token each, and sequences of every length about a strip."""
    D, first, last = 144, [5, -1, 0, 3, -1, 2, 7], [5, 1, 0, -1, -1, 6, 7]
    weight, bias = (t.to(dtype) for t in conv_inputs(D=D)[2:])
    bias = bias if has_bias else None
    for lengths in ([1] * 7, [0, 1, 2, 3, 4, 66, 130], [130, 64, 0, 66, 1, 2, 3]):
        pool, bounds = torch.randn(8, 3 * D + 8).to(dtype), torch.tensor([0, *lengths]).cumsum(0)
        pages, want_pool = pool[:, :3 * D].view(8, 3, D), pool.clone()
        wide = torch.randn(int(bounds[-1]), 2 * D).to(dtype)
        x, want = wide[:, D:], torch.empty(len(wide), D, dtype=dtype)
        for n, (before, after) in enumerate(zip(first, last, strict=True)):
            cache = torch.zeros(1, D, 4, dtype=dtype)
            if before >= 0:
                cache[0, :, 1:] = pages[before].T
            for t in range(bounds[n], bounds[n + 1]):
                want[t] = loops.convolve_token(x[t:t + 1], cache, weight, bias, True)[0]
            if after >= 0 and lengths[n] > 0:
                want_pool[after, :3 * D] = cache[0, :, 1:].T.flatten()
        tokens = None if max(lengths) == 1 else bounds
        assert torch.equal(loops.convolve_in_pages(x, pages, weight, bias, True, first, last, tokens), want)
        assert torch.equal(pool, want_pool)


@pytest.mark.parametrize(('change', 'message'), [
    ({'pages': [0, 7]}, r'must name one of 7 pages, .* got \[0, 7\]'), ({'pages': [0]}, 'for each of 2 sequences'),
    ({'D': 60}, 'a multiple of 16 channels, got 60'), ({'taps': 3}, r'weight must have shape \[64, 4\]'),
    ({'width': 4}, r'pages must have shape \[7, 3, 64\]'),
    ({'last': [0, 7]}, r'must name one of 7 pages, .* got \[0, 1\] and \[0, 7\]'),
    *(({'bounds': bounds}, 'cu_seqlens must rise from 0 to 2') for bounds in ([0, 2, 1], [0, 3, 2], [0, 1, 1], [1, 1, 2])),
])
def test_bad_pages(change, message):
    D, rows, bounds = change.get('D', 64), change.get('pages', [0, 1]), change.get('bounds')
    pages, weight = torch.zeros(7, change.get('width', 3), D), torch.zeros(D, change.get('taps', 4))
    with pytest.raises(ValueError, match=message):
        loops.convolve_in_pages(
            torch.zeros(2, D), pages, weight, None, True, rows, change.get('last', rows),
            None if bounds is None else torch.tensor(bounds),
        )


@torch.no_grad()
def test_bfloat16_is_float32_rounded_at_the_end(served):
    """No loop keeps a sum in bfloat16; a state and a weight in another dtype than the input are read as they are."""
    x, cache, weight, bias = (t.bfloat16() for t in conv_inputs())
    wide_cache = cache.float()
    want = causal_conv1d_update(x.float(), wide_cache, None, weight.float(), bias.float(), 'silu')[0].bfloat16()
    for parameters in ((weight, bias), (weight.float(), bias.float()), (weight, bias.float())):
        for states in (cache.clone(), cache.float()):
            assert torch.equal(causal_conv1d_update(x, states, None, *parameters, 'silu')[0], want)
            assert torch.equal(states.float(), wide_cache)
    layer, rows = RMSNorm(67).bfloat16(), torch.randn(5, 67).bfloat16()
    torch.nn.init.normal_(layer.weight)
    got, wide = layer(rows), layer.float()
    assert torch.equal(got, wide(rows.float()).bfloat16()) and torch.equal(got, wide(rows))
    assert set(served) == {'convolve_token', 'rms_norm'}
    # strips of 64 tokens hand their part of the next strip's gradients over in float32
    x, dy, weight, bias = torch.randn(2, 150, 32), torch.randn(2, 150, 32), torch.randn(32, 4), torch.randn(32)
    x, dy = x.bfloat16(), dy.bfloat16()
    y, wide = (loops.convolve(rows, weight, bias, None, True) for rows in (x, x.float()))
    assert torch.equal(y, wide.bfloat16())
    narrow = loops.convolve_gradients(dy, x, weight, bias, None, True)
    wide = loops.convolve_gradients(dy.float(), x.float(), weight, bias, None, True)
    assert torch.equal(narrow[0], wide[0].bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(narrow[1:], wide[1:], strict=True))


# sequences of less than a kernel, whole strips of 64 tokens and parts of one; a block of 128 channels and a vector more
@pytest.mark.parametrize('activation', [None, 'silu'])
@pytest.mark.parametrize('extras', [True, False])
@pytest.mark.parametrize(('length', 'channels'), [(1, 16), (2, 16), (3, 16), (4, 48), (64, 16), (66, 144), (130, 32)])
def test_streams(served, activation, extras, length, channels):
    check(inputs_of((2, length, channels), extras=extras, state=False), activation, final=False)
    assert served == ['convolve', 'convolve_gradients']


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('activation', [None, 'silu'])
def test_packed_streams(served, activation, dtype):
    """Sequences of several strips too."""
    lengths = [*LENGTHS, 70, 0, 140]
    check(inputs_of((1, sum(lengths), 32), 4, lengths, dtype, state=False), activation, lengths, final=False)
    assert served == ['convolve', 'convolve_gradients']


def test_long_sums_keep_their_digits():
    """Gradients of taps are sums over all tokens, each strip's added in float64."""
    x, dy = torch.rand(1, 200_000, 16) + 0.5, torch.rand(1, 200_000, 16) + 0.5
    _, dtaps, dbias = loops.convolve_gradients(dy, x, torch.randn(16, 4), None, None, False)
    assert_close('dbias', dbias, dy.double().sum((0, 1)), 1e-7)
    assert_close('dtaps', dtaps[:, 3], (dy.double() * x.double()).sum((0, 1)), 1e-7)


@pytest.mark.parametrize('case', ['state', 'final state', 'width', 'channels', 'float64'])
def test_streams_not_served(served, case):
    shape, width = (2, 9, 18 if case == 'channels' else 16), 3 if case == 'width' else 4
    given = inputs_of(shape, width, dtype=torch.float64 if case == 'float64' else torch.float32, state=case == 'state')
    outputs = convolve(**given, final=case == 'final state')
    loss = sum(x.square().sum() for x in outputs)
    torch.autograd.grad(loss, given['x'])
    # the loop's forward pass, and PyTorch's backward pass
    assert served == (['convolve'] if case == 'final state' else [])


@torch.no_grad()
def test_an_update_is_seen_by_autograd():
    x, cache, weight, bias = conv_inputs()
    with torch.enable_grad():
        scale = torch.ones_like(cache, requires_grad=True)
        loss = (scale * cache).sum()
    causal_conv1d_update(x, cache, None, weight, bias, 'silu')
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


def test_registered_for_the_modules():
    """`fla_longhorn.modules` import no loops: the package registers them."""
    assert load_loops(torch.zeros(2, 4), None) is loops
    assert load_loops(torch.zeros(2, 4, dtype=torch.float64)) is load_loops(torch.zeros(4, 2).mT) is None
