import pytest
import torch
from fla.ops.longhorn import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla.utils import assert_close, device

NAMES = ('q', 'k', 'v', 'beta', 'h0')


def make_inputs(B: int, T: int, H: int, K: int, V: int, N: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(42)
    q, k = (torch.randn(B, T, H, K, dtype=dtype, device=device) / K**0.5 for _ in range(2))
    v, beta = (torch.randn(B, T, H, V, dtype=dtype, device=device) for _ in range(2))
    h0 = torch.randn(N, H, K, V, dtype=torch.float32, device=device)
    return [x.requires_grad_() for x in (q, k, v, beta.sigmoid().detach(), h0)]


def run(op, inputs: list[torch.Tensor], **kwargs) -> tuple[torch.Tensor, ...]:
    """Output, final state and gradients."""
    *args, h0 = inputs
    o, ht = op(*args, initial_state=h0, output_final_state=True, **kwargs)
    torch.manual_seed(43)
    do, dht = (torch.randn(x.shape, device=device) for x in (o, ht))
    return o, ht, *torch.autograd.grad((o * do.to(o.dtype)).sum() + (ht * dht.to(ht.dtype)).sum(), inputs)


def check(op, inputs: list[torch.Tensor], ratio: float, **kwargs) -> None:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ref = run(naive_recurrent_longhorn, exact, **kwargs)
    tri = run(op, inputs, **kwargs)
    for name, a, b in zip(('o', 'ht', *(f'd{x}' for x in NAMES)), ref, tri, strict=True):
        assert_close(name, a.to(b.dtype), b, ratio)


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize(
    ('B', 'T', 'H', 'K', 'V', 'dtype'),
    [
        pytest.param(*test, id="B{}-T{}-H{}-K{}-V{}-{}".format(*test))
        for test in [
            (1, 15, 1, 16, 32, torch.float),
            (2, 80, 2, 16, 48, torch.float),
            (1, 70, 2, 64, 64, torch.bfloat16),
        ]
    ],
)
def test_longhorn(B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype, exact: bool, op):
    check(op, make_inputs(B, T, H, K, V, B, dtype), 0.001 if dtype == torch.float else 0.01, exact=exact)


@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('cu_seqlens', [[0, 15, 80], [0, 64, 65, 100]])
def test_longhorn_varlen(cu_seqlens: list[int], exact: bool):
    inputs = make_inputs(1, cu_seqlens[-1], 2, 16, 32, len(cu_seqlens) - 1, torch.float)
    check(chunk_longhorn, inputs, 0.001, exact=exact, cu_seqlens=torch.tensor(cu_seqlens, device=device))


@pytest.mark.parametrize('exact', [False, True])
def test_longhorn_state_update(exact: bool):
    *inputs, h0 = (x.detach() for x in make_inputs(2, 3, 2, 16, 32, 2, torch.float))
    ref, ref_ht = naive_recurrent_longhorn(
        *(x.double() for x in inputs), initial_state=h0.double(), output_final_state=True, exact=exact,
    )
    tri = torch.cat([longhorn_state_update(h0, *(x[:, t:t + 1] for x in inputs), exact=exact) for t in range(3)], 1)
    assert_close('o', ref.float(), tri, 0.001)
    assert_close('ht', ref_ht.float(), h0, 0.001)
