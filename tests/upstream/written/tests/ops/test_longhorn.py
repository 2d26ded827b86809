import pytest
import torch
from fla.ops.cp import FLACPContext
from fla.ops.longhorn import (
    chunk_longhorn,
    fused_recurrent_longhorn,
    longhorn_state_update,
    naive_chunk_longhorn,
    naive_recurrent_longhorn,
)
from fla.ops.longhorn.checkpoints import checkpoint_interval
from fla.utils import assert_close, device

# no multiple of a chunk, which has 8 or 16 tokens; two intervals between saved states
SIZES = (1, 35, 2, 4, 12)
# what differs from a call with an initial state: sizes of optional inputs, and flags
OPTIONS = {
    'scale': dict(scale=0.3),
    'initial_state': dict(initial_state=None),
    'beta_per_head': dict(beta='BTH'),
    'D': dict(D=True),
    'z': dict(z=True),
    'use_beta_sigmoid_in_kernel': dict(use_beta_sigmoid_in_kernel=True),
    'state_v_first': dict(state_v_first=True),
    'allow_neg_eigval': dict(allow_neg_eigval=True),
    'g_per_head': dict(g='BTH'),
    'g_per_channel': dict(g='BTHV'),
    'all': dict(
        scale=0.3, D=True, z=True, use_beta_sigmoid_in_kernel=True, state_v_first=True, allow_neg_eigval=True, g='BTH',
    ),
}


def make_call(B, T, H, K, V, N=None, dtype=torch.float, beta='BTHV', g=None, D=False, z=False, **flags):
    """Inputs that need a gradient, and flags."""
    torch.manual_seed(42)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, dtype=dtype, device=device)

    shapes = {'BTH': (B, T, H), 'BTHV': (B, T, H, V)}
    state = (N or B, H, V, K) if flags.get('state_v_first') else (N or B, H, K, V)
    inputs = {'q': draw(B, T, H, K), 'k': draw(B, T, H, K), 'v': draw(B, T, H, V), 'beta': draw(*shapes[beta])}
    if not flags.get('use_beta_sigmoid_in_kernel'):
        inputs['beta'] = inputs['beta'].sigmoid()
    if 'initial_state' not in flags:
        inputs['initial_state'] = draw(*state, dtype=torch.float)
    if D:
        inputs['D'] = draw(H, V)
    if z:
        inputs['z'] = draw(B, T, H, V)
    if g is not None:
        inputs['g'] = draw(*shapes[g]).sigmoid().log()
    return {name: x.requires_grad_() for name, x in inputs.items()}, flags


def run(op, inputs, flags):
    """Output, final state and the gradients of all inputs."""
    o, ht = op(**inputs, **flags, output_final_state=True)
    torch.manual_seed(43)
    do, dht = (torch.randn(x.shape, device=device) for x in (o, ht))
    grads = torch.autograd.grad((o * do.to(o.dtype)).sum() + (ht * dht.to(ht.dtype)).sum(), list(inputs.values()))
    return {'o': o, 'ht': ht, **{f'd{name}': dx for name, dx in zip(inputs, grads, strict=True)}}


def check(op, inputs, flags, ratio=1e-4):
    """`op` against the naive op in float64."""
    ref = run(naive_recurrent_longhorn, {name: x.detach().double().requires_grad_() for name, x in inputs.items()}, flags)
    tri = run(op, inputs, flags)
    for name, x in tri.items():
        assert x.dtype == (torch.float if name == 'ht' else inputs.get(name[1:], inputs['v']).dtype)
        assert_close(name, ref[name].to(x.dtype), x, ratio)


@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize('option', OPTIONS)
def test_options(option: str, op, exact: bool):
    check(op, *make_call(*SIZES, **OPTIONS[option], exact=exact))


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize(
    ('B', 'T', 'H', 'K', 'V', 'dtype'),
    [
        pytest.param(*test, id="B{}-T{}-H{}-K{}-V{}-{}".format(*test))
        for test in [
            (2, 15, 1, 16, 32, torch.float),
            (2, 1000, 2, 64, 100, torch.bfloat16),
            (1, 2049, 4, 16, 128, torch.bfloat16),
        ]
    ],
)
def test_sizes(B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype, exact: bool, op):
    call = make_call(B, T, H, K, V, dtype=dtype, z=True, D=True, g='BTH', exact=exact)
    check(op, *call, ratio=1e-4 if dtype == torch.float else 0.01)


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('lengths', [(15, 20), (32, 1, 0, 17)])
def test_varlen(lengths: tuple[int, ...], exact: bool, op):
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    inputs, flags = make_call(1, sum(lengths), *SIZES[2:], N=len(lengths), g='BTH', exact=exact)
    check(op, inputs, {**flags, 'cu_seqlens': cu_seqlens})


def test_without_final_state():
    inputs, flags = make_call(*SIZES)
    assert chunk_longhorn(**inputs, **flags)[1] is None


@pytest.mark.parametrize('exact', [False, True])
def test_cp_context_of_one_rank(exact: bool):
    cu_seqlens = torch.tensor([0, 15, 35], device=device)
    inputs, flags = make_call(1, *SIZES[1:], initial_state=None, exact=exact)
    o, _ = naive_recurrent_longhorn(**inputs, **flags, cu_seqlens=cu_seqlens)
    split, ht = chunk_longhorn(**inputs, **flags, cp_context=FLACPContext(cu_seqlens=cu_seqlens))
    assert ht is None
    assert_close('o', o, split, 1e-4)


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn, naive_chunk_longhorn])
def test_host_copy_of_boundaries(op):
    inputs, flags = make_call(1, *SIZES[1:], N=2)
    with pytest.raises(ValueError, match='cu_seqlens_cpu|T = 35'):
        op(**inputs, **flags, cu_seqlens=torch.tensor([0, 15, 35], device=device), cu_seqlens_cpu=torch.tensor([0, 15, 40]))


@torch.no_grad()
@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize('exact', [False, True])
def test_intermediate_states(exact: bool, op):
    B, T, H, K, V = SIZES
    inputs, flags = make_call(*SIZES, exact=exact)
    o, ht, states = op(**inputs, **flags, return_intermediate_states=True)
    n = checkpoint_interval(K)
    heads = {name: x if name == 'initial_state' else x[:, :n] for name, x in inputs.items()}
    ref_o, _ = naive_recurrent_longhorn(**inputs, **flags)
    _, ref = naive_recurrent_longhorn(**heads, **flags, output_final_state=True)
    assert ht is None and n < T < 2 * n
    assert_close('o', ref_o, o, 1e-4)
    assert_close('states', torch.stack([inputs['initial_state'], ref], 1), states, 1e-4)


@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('option', ['all', 'g_per_channel'])
def test_naive_chunk(option: str, exact: bool):
    check(naive_chunk_longhorn, *make_call(*SIZES, **OPTIONS[option], exact=exact))


@torch.no_grad()
@pytest.mark.parametrize('exact', [False, True])
def test_state_update(exact: bool):
    inputs, flags = make_call(2, 3, 2, 16, 32, z=True, exact=exact)
    ref, ref_ht = naive_recurrent_longhorn(**inputs, **flags, output_final_state=True)
    h0 = inputs.pop('initial_state').detach()
    tri = [longhorn_state_update(h0, **{name: x[:, t:t + 1] for name, x in inputs.items()}, **flags) for t in range(3)]
    assert_close('o', ref, torch.cat(tri, 1), 1e-4)
    assert_close('ht', ref_ht, h0, 1e-4)


# the recurrent kernels, and those for more than 64 tokens
@torch.no_grad()
@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('T', [1, 70])
def test_pool(T: int, exact: bool):
    """Sequences that go on in their row, that start from zero and end in another row, and without a row."""
    inputs, flags = make_call(3, T, 2, 16, 32, z=True, initial_state=None, exact=exact)
    pool = torch.randn(6, 2, 16, 32, device=device)
    expected, h0 = pool.clone(), pool.new_zeros(3, 2, 16, 32)
    h0[0] = pool[4]
    ref, ht = naive_recurrent_longhorn(**inputs, **{**flags, 'initial_state': h0}, output_final_state=True)
    ref[2] = 0
    expected[4], expected[5] = ht[:2]
    del flags['initial_state']
    o = longhorn_state_update(
        pool,
        **inputs,
        **flags,
        state_indices=torch.tensor([4, 0, -1], device=device),
        final_state_indices=torch.tensor([4, 5, 1], device=device),
        has_initial_state=torch.tensor([True, False, True], device=device),
    )
    assert_close('o', ref, o, 1e-4)
    assert_close('pool', expected, pool, 1e-4)
