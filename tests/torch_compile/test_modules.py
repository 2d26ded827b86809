"""The traceable modules against the modules of fla that they extend."""

import pytest
import torch
from fla import modules as fla

from fla_longhorn import modules
from fla_longhorn.modules.rows import Padded
from tests.torch_compile.graphs import assert_equal, compiled, gradients, read, weighted


def against_fla(ours, theirs, inputs: dict, **options) -> None:
    """Compiled outputs and gradients, and those outside a trace bit by bit."""
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(ours, type(theirs))
    results = []
    function, counter = compiled(ours)
    for module, call in ((theirs, theirs), (ours, ours), (ours, function)):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        outputs = call(**leaves, **options)
        outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
        named = [*leaves.items(), *module.named_parameters()]
        weighed = [outputs[0], *map(read, outputs[1:])] if isinstance(module, fla.ShortConvolution) else outputs
        results.append(dict(enumerate(outputs)) | gradients(weighted(*weighed), named))
    expected, eager, got = results
    assert all(torch.equal(eager[name], x) for name, x in expected.items())
    tolerance = 2e-6 if inputs['x'].dtype == torch.float32 else 1e-2
    assert_equal(got, expected, tolerance)
    assert counter.frame_count == 1


def noise(module, device, dtype=torch.float32):
    with torch.no_grad():
        for x in module.parameters():
            x.add_(torch.randn_like(x) * 0.3)
    return module.to(device, dtype)


@pytest.mark.fla_kernels
@pytest.mark.parametrize(('dtype', 'residual'), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
@pytest.mark.parametrize('options', [{}, {'bias': True}, {'elementwise_affine': False}], ids=str)
def test_norm(options, residual, dtype, device):
    ours, theirs = (noise(package.RMSNorm(24, **options), device, dtype) for package in (modules, fla))
    inputs = {'x': torch.randn(2, 5, 24, device=device, dtype=dtype)}
    if residual:
        inputs['residual'] = torch.randn(2, 5, 24, device=device)
    against_fla(ours, theirs, inputs, prenorm=residual, residual_in_fp32=residual)


@pytest.mark.fla_kernels
@pytest.mark.parametrize('lengths', [None, [1, 9, 0, 2, 3, 0]], ids=['rows', 'packed'])
@pytest.mark.parametrize('given', [False, True], ids=['', 'cache'])
@pytest.mark.parametrize('width', [1, 4])
def test_convolution(width, given, lengths, device):
    N, shape = (2, (2, 7, 6)) if lengths is None else (len(lengths), (1, sum(lengths), 6))
    options = {'bias': given, 'activation': 'silu' if given else None}
    ours, theirs = (noise(package.ShortConvolution(6, width, **options), device) for package in (modules, fla))
    inputs = {'x': torch.randn(shape, device=device)}
    if given:
        inputs |= {'cache': torch.randn(N, 6, width, device=device), 'residual': torch.randn(shape, device=device)}
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths], device=device).cumsum(0)
    against_fla(ours, theirs, inputs, output_final_state=True, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize('given', [False, True], ids=['', 'cache'])
@torch.no_grad()
def test_padding(given, device):
    """Only the convolution moves tokens: each row's output and state are those of its tokens alone."""
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]], device=device)
    x, cache = torch.randn(5, 5, 6, device=device), torch.randn(5, 6, 4, device=device) if given else None
    padding, conv = Padded(mask), noise(modules.ShortConvolution(6, 4, bias=True, activation='silu'), device)
    assert torch.equal(padding.enter(x), x * mask[..., None])
    assert torch.equal(padding.leave(x), x * mask[..., None])
    assert torch.equal(padding.silence(torch.ones_like(x)), mask[..., None].expand_as(x).to(x))
    y, state = conv(x, cache=cache, output_final_state=True, **padding.of_convolution)
    for i, kept in enumerate(mask.bool()):
        before = None if cache is None else cache[i:i + 1]
        if kept.any():
            want = conv(x[i:i + 1, kept], cache=None if cache is None else before.clone(), output_final_state=True)
        else:
            want = x[i:i + 1, kept], torch.zeros_like(state[:1]) if cache is None else before
        assert_equal({'y': y[i:i + 1, kept], 'state': state[i:i + 1]}, {'y': want[0], 'state': want[1]})
