"""The interpreter computes in bfloat16 as GPUs do."""

import torch
import triton
import triton.language as tl

from tests.devices import INTERPRETING


@triton.jit
def convert_kernel(x, y, N: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(y + o_n, tl.load(x + o_n).to(tl.bfloat16))


if INTERPRETING:
    def test_rounding_is_that_of_torch():
        """To the nearest, ties to even, over into the next exponent; subnormal numbers, infinity and NaN."""
        ties = (torch.arange(2**16) << 16 | 0x8000).to(torch.int32)
        bits = torch.cat([ties, ties - 1, ties + 1, torch.randint(-2**31, 2**31, (2**16,)).to(torch.int32)])
        x = bits.view(torch.float32)
        y = torch.empty(x.shape, dtype=torch.bfloat16)
        convert_kernel[1,](x, y, x.numel())
        torch.testing.assert_close(y, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
