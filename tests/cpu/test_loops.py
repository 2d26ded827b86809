"""Norm and convolution of float32 tensors by the compiled loops: which calls they serve, and their results."""

import pytest
import torch
from fla.modules import RMSNorm
from fla.modules.causal_conv1d import causal_conv1d_update

from fla_longhorn.cpu import loops, norms
from fla_longhorn.ops import numba
from tests.cpu.reference import assert_close, norm


@pytest.fixture
def served(monkeypatch):
    """The names of the loops that ran."""
    names = []
    for name in ('rms_norm', 'convolve_token'):
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
    with torch.no_grad():
        y = layer(x)
    assert served == ['rms_norm'] or T == 0
    weight = layer.weight.double() if affine else None
    assert_close('output', y, norm(x.double(), weight, None, 1e-5, True, 1), 1e-6)


@torch.no_grad()
def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(numba, 'MIN_PARALLEL_UPDATES', 0)
    x, weight, ran, results = torch.randn(100, 30), torch.randn(30), [], []
    run = numba.threads.run
    monkeypatch.setattr(numba.threads, 'run', lambda loop, n_w, *args: ran.append(n_w) or run(loop, n_w, *args))
    # the first call compiles, on one thread
    for n in (1, 2):
        monkeypatch.setattr(torch, 'get_num_threads', lambda n=n: n)
        results.append(loops.rms_norm(x, weight, 1e-6))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and ran == [2]


def test_norm_with_gradients(served):
    """The loop is inside fla's autograd function."""
    x, layer, dy = torch.randn(4, 40, requires_grad=True), RMSNorm(40), torch.randn(4, 40)
    layer(x).backward(dy)
    got, weight = x.grad.clone(), layer.weight.detach().double()
    wide = x.detach().double().requires_grad_()
    norm(wide, weight, None, 1e-5, True, 1).backward(dy.double())
    assert served == ['rms_norm']
    assert_close('dx', got, wide.grad, 1e-5)


@pytest.mark.parametrize('swish', [False, True])
@pytest.mark.parametrize('has_bias', [False, True])
@pytest.mark.parametrize('W', [2, 4])
@torch.no_grad()
def test_convolution(served, swish, has_bias, W):
    x, cache, weight, bias = conv_inputs(W=W)
    bias = bias if has_bias else None
    activation = 'silu' if swish else None
    final = torch.cat([cache[..., 1:], x[..., None]], -1)
    want = (final.double() * weight.double()).sum(-1) + (bias.double() if has_bias else 0)
    want = torch.nn.functional.silu(want) if swish else want
    y, after = causal_conv1d_update(x, cache, None, weight, bias, activation)
    assert served == ['convolve_token'] and after is cache
    assert_close('output', y, want, 1e-6)
    assert torch.equal(cache, final)


@torch.no_grad()
def test_an_update_is_seen_by_autograd():
    x, cache, weight, bias = conv_inputs()
    with torch.enable_grad():
        scale = torch.ones_like(cache, requires_grad=True)
        loss = (scale * cache).sum()
    causal_conv1d_update(x, cache, None, weight, bias, 'silu')
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


@torch.no_grad()
def test_parameters_can_be_freed():
    """FSDP2 takes the memory of parameters away and gives it back, which NumPy's arrays would forbid."""
    x, cache, weight, bias = conv_inputs()
    scale = torch.randn(22)
    causal_conv1d_update(x, cache, None, weight, bias, 'silu')
    loops.rms_norm(x, scale, 1e-5)
    for parameter in (weight, bias, scale):
        parameter.untyped_storage().resize_(0)


@torch.no_grad()
def test_not_served(served, monkeypatch):
    x, cache, weight, bias = conv_inputs()
    layer = RMSNorm(22)
    layer(x.double())
    for other in (cache.bfloat16(), cache.mT.contiguous().mT):
        causal_conv1d_update(x, other, None, weight, bias, 'silu')
    torch.func.vmap(lambda y: norms.layer_norm_fwd(y, layer.weight, None, is_rms_norm=True)[0])(x[None])
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'torch')
    layer(x)
    causal_conv1d_update(x, cache, None, weight, bias, 'silu')
    assert served == []


@torch.no_grad()
def test_sizes_that_do_not_fit():
    """Addresses have no sizes: nothing may be read or written beyond."""
    x, cache, weight, bias = conv_inputs()
    with pytest.raises(ValueError, match=r'weight must have shape \[44\]'):
        RMSNorm(22)(torch.randn(3, 44))
    with pytest.raises(ValueError, match=r'cache must have shape \[3, 22, 4\]'):
        causal_conv1d_update(x, cache[:2].contiguous(), None, weight, bias, 'silu')
