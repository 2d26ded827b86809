import pytest
import torch
from fla.modules.rotary import rotary_embedding

from tests.reference import DTYPES, assert_close, compare, strided


def rotate(x, cos, sin, positions, interleaved):
    """Pairs of channels as complex numbers times `cos + i sin`; `positions` `[B or 1, T]`, negative ones become zero."""
    width = cos.shape[-1]
    turned, rest = x[..., :2 * width], x[..., 2 * width:]
    pairs = turned.unflatten(-1, (width, 2)) if interleaved else turned.unflatten(-1, (2, width)).mT
    angle = torch.complex(cos, sin)[positions.clamp_min(0)][:, :, None] * (positions >= 0)[..., None, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    return torch.cat([turned.flatten(-2) if interleaved else turned.mT.flatten(-2), rest], -1)


def tables(length, width, dtype):
    angle = torch.rand(length, width, dtype=torch.float64) * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


def compare_rotation(x, width, positions, interleaved, **options):
    cos, sin = tables(16, width, x.dtype)
    compare(
        lambda x: (rotary_embedding(x, cos, sin, interleaved=interleaved, **options),),
        lambda x: (rotate(x, cos.double(), sin.double(), positions, interleaved),), {'x': x}, x.dtype,
    )


@pytest.mark.parametrize('interleaved', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('width', [4, 3])
@pytest.mark.parametrize('offset', [0, 3, -2, 'each'])
def test_batch(interleaved, dtype, width, offset):
    offsets = torch.tensor([-2, 4]) if offset == 'each' else offset
    positions = torch.arange(7) + (offsets[:, None] if offset == 'each' else torch.tensor([[offset]]))
    compare_rotation(strided(2, 7, 3, 8, dtype=dtype), width, positions, interleaved, seqlen_offsets=offsets)


@pytest.mark.parametrize('interleaved', [False, True])
@pytest.mark.parametrize('each', [[0, 0, 0, 0], [2, 0, 5, -1]], ids=['0', 'each'])
@pytest.mark.parametrize('bounds_dtype', [torch.int32, torch.int64])
def test_packed(interleaved, each, bounds_dtype):
    bounds = torch.tensor([0, 3, 3, 4, 9], dtype=bounds_dtype)
    positions = torch.cat([torch.arange(length) + start for length, start in zip([3, 0, 1, 5], each, strict=True)])[None]
    offsets = torch.tensor(each) if any(each) else 0
    compare_rotation(strided(1, 9, 2, 6), 3, positions, interleaved, seqlen_offsets=offsets, cu_seqlens=bounds)


@pytest.mark.parametrize('interleaved', [False, True])
def test_inplace_keeps_tokens_before_the_first_position(interleaved):
    x, (cos, sin) = torch.randn(2, 5, 3, 8), tables(8, 3, torch.float32)
    positions = torch.arange(-2, 3)[None]
    want = rotate(x.double(), cos.double(), sin.double(), positions, interleaved)
    want[:, :2] = x[:, :2].double()
    y = rotary_embedding(x, cos, sin, interleaved=interleaved, inplace=True, seqlen_offsets=-2)
    assert y.data_ptr() == x.data_ptr()
    assert_close('output', x, want, 1e-6)
