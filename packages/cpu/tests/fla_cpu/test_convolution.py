import itertools

import pytest
import torch
from fla.modules import ShortConvolution
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update

from tests.reference import DTYPES, OUTPUT_TOLERANCE, assert_close, compare, convolve, strided, tensor

# empty, shorter than any width, and long sequences
LENGTHS = [3, 0, 1, 2, 17, 1, 0, 9]


def bounds_of(lengths):
    return None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)


def batched(x, weight, bias=None, residual=None, state=None, activation=None, lengths=None):
    """The reference for every sequence by itself: rows of a batch, or of `lengths` in a packed one."""
    def pieces(rows):
        return itertools.repeat(None) if rows is None else rows if lengths is None else rows[0].split(lengths)

    sequences = zip(pieces(x), pieces(residual), itertools.repeat(None) if state is None else state, strict=False)
    pairs = [convolve(piece, weight, bias, extra, past, activation) for piece, extra, past in sequences]
    outputs, finals = zip(*pairs, strict=True)
    return torch.stack(outputs) if lengths is None else torch.cat(outputs)[None], torch.stack(finals)


def inputs_of(shape, width=4, lengths=None, dtype=torch.float32, extras=True, state=True):
    channels, sequences = shape[-1], shape[0] if lengths is None else len(lengths)
    return {
        'x': strided(*shape, dtype=dtype),
        'weight': tensor(channels, width, dtype=dtype),
        'bias': tensor(channels, dtype=dtype) if extras else None,
        'residual': strided(*shape, dtype=dtype) if extras else None,
        'state': tensor(sequences, channels, width, dtype=dtype) if state else None,
    }


def run(x, weight, bias=None, residual=None, state=None, activation='silu', lengths=None, final=True):
    """Outputs; without the final state, whose gradient keeps sequences from the compiled loops, only on request."""
    return causal_conv1d(
        x, weight, bias, residual, initial_state=state, output_final_state=final, activation=activation,
        cu_seqlens=bounds_of(lengths),
    )[:1 + final]


def check(inputs, activation='silu', lengths=None, final=True):
    compare(
        lambda **given: run(**given, activation=activation, lengths=lengths, final=final),
        lambda **given: batched(**given, activation=activation, lengths=lengths)[:1 + final], inputs, inputs['x'].dtype,
    )


# a batch of two rows of this length, or packed sequences; and the kernel's width
SIZES = [(1, 4), (2, 4), (3, 4), (4, 4), (33, 4), (5, 1), (6, 2), (7, 3), (4, 5)]
SIZES += [(LENGTHS, width) for width in (1, 2, 3, 4, 6)]


@pytest.mark.parametrize('activation', [None, 'silu'])
@pytest.mark.parametrize('extras', [True, False])
@pytest.mark.parametrize('state', [True, False])
@pytest.mark.parametrize('dtype', [*DTYPES, torch.float64])
@pytest.mark.parametrize(('length', 'width'), SIZES, ids=lambda x: 'packed' if x is LENGTHS else x)
def test_equation(activation, extras, state, dtype, length, width):
    shape, lengths = ((1, sum(LENGTHS), 6), LENGTHS) if length is LENGTHS else ((2, length, 6), None)
    check(inputs_of(shape, width, lengths, dtype, extras, state), activation, lengths)


def test_several_blocks_of_time(monkeypatch):
    monkeypatch.setattr('fla_cpu.convolution.BLOCK_ELEMENTS', 30)
    check(inputs_of((2, 23, 6)))


def short_convolution(width=4, bias=True, activation='silu', dtype=torch.float32):
    module = ShortConvolution(6, width, bias=bias, activation=activation, dtype=dtype)
    return module, module.weight.detach().squeeze(1).double(), module.bias.detach().double() if bias else None


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('width', [1, 2, 4, 5])
@pytest.mark.parametrize('extras', [True, False])
@pytest.mark.parametrize('chunks', [[1] * 9, [5, 1, 1, 1, 1], [2, 3, 1, 3], [1, 2, 6]])
def test_short_convolution_with_a_cache(dtype, width, extras, chunks):
    """Without a residual the compiled loop takes single tokens."""
    activation = 'silu' if extras else None
    module, weight, bias = short_convolution(width, extras, activation, dtype)
    x, residual = strided(3, 9, 6, dtype=dtype, requires_grad=False), torch.randn(3, 9, 6, dtype=dtype)
    want, final = batched(x.double(), weight, bias, residual.double() if extras else None, activation=activation)
    cache, outputs = None, []
    with torch.no_grad():
        for piece, extra in zip(x.split(chunks, 1), residual.split(chunks, 1), strict=True):
            y, after = module(piece, residual=extra if extras else None, cache=cache, output_final_state=True)
            # decoding updates it in place
            assert after is cache or cache is None or piece.shape[1] > 1
            cache = after
            outputs.append(y)
    assert cache.dtype == dtype and cache.shape == (3, 6, width)
    assert_close('output', torch.cat(outputs, 1), want, OUTPUT_TOLERANCE[dtype])
    # nothing is computed on the way into the cache
    assert torch.equal(cache.double(), final)


@pytest.mark.parametrize('requires_grad', [True, False])
def test_short_convolution_packed_with_a_cache(requires_grad):
    module, weight, bias = short_convolution()
    x, cache = torch.randn(1, sum(LENGTHS), 6), torch.randn(len(LENGTHS), 6, 4)
    want, final = batched(x.double(), weight, bias, state=cache.double(), activation='silu', lengths=LENGTHS)
    before = cache.clone()
    with torch.set_grad_enabled(requires_grad):
        y, after = module(x, cache=cache, output_final_state=True, cu_seqlens=bounds_of(LENGTHS).int())
    assert_close('output', y, want, 1e-5)
    assert torch.equal(after.double(), final)
    assert torch.equal(cache, before)


@pytest.mark.parametrize('shape', [(5, 6), (5, 1, 6), (1, 5, 6), (5, 1, 2, 3)])
@pytest.mark.parametrize('activation', [None, 'silu'])
def test_update(shape, activation):
    x, cache = strided(*shape, requires_grad=False), torch.randn(5, 4, 6, dtype=torch.bfloat16).mT
    weight, bias, residual = torch.randn(6, 4), torch.randn(6), torch.randn(shape)
    rows = (t.double().reshape(5, 1, 6) for t in (x, residual))
    token, extra = rows
    want, final = batched(token, weight.double(), bias.double(), extra, cache.double(), activation)
    y, after = causal_conv1d_update(x, cache, residual, weight, bias, activation)
    assert y.shape == x.shape and after is cache
    assert_close('output', y.reshape(5, 1, 6), want, 1e-5)
    assert torch.equal(cache, final.to(cache.dtype))
