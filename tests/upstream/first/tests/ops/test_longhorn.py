import pytest
import torch
from fla.ops.longhorn import chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn
from fla.utils import assert_close, device

# no multiple of a chunk, which has 8 or 16 tokens; two intervals between saved states
SIZES = (1, 35, 2, 4, 12)
# what differs from a call with an initial state: sizes of optional inputs, and flags
OPTIONS = {
    'scale': dict(scale=0.3),
    'initial_state': dict(initial_state=None),
    'beta_per_head': dict(beta='head'),
    'D': dict(D=True),
    'z': dict(z=True),
    'use_beta_sigmoid_in_kernel': dict(use_beta_sigmoid_in_kernel=True),
    'state_v_first': dict(state_v_first=True),
    'allow_neg_eigval': dict(allow_neg_eigval=True),
    'g': dict(g=True),
    'all': dict(
        scale=0.3, D=True, z=True, use_beta_sigmoid_in_kernel=True, state_v_first=True, allow_neg_eigval=True, g=True,
    ),
}


def make_call(B, T, H, K, V, N=None, dtype=torch.float, beta='channel', g=False, D=False, z=False, **flags):
    """Inputs that need a gradient, and flags."""
    torch.manual_seed(42)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, dtype=dtype, device=device)

    state = (N or B, H, V, K) if flags.get('state_v_first') else (N or B, H, K, V)
    inputs = {'q': draw(B, T, H, K), 'k': draw(B, T, H, K), 'v': draw(B, T, H, V)}
    inputs['beta'] = draw(B, T, H) if beta == 'head' else draw(B, T, H, V)
    if not flags.get('use_beta_sigmoid_in_kernel'):
        inputs['beta'] = inputs['beta'].sigmoid()
    if 'initial_state' not in flags:
        inputs['initial_state'] = draw(*state, dtype=torch.float)
    if D:
        inputs['D'] = draw(H, V)
    if z:
        inputs['z'] = draw(B, T, H, V)
    if g:
        inputs['g'] = draw(B, T, H).sigmoid().log()
    return {name: x.requires_grad_() for name, x in inputs.items()}, flags


def run(op, inputs, flags):
    """Output, final state and the gradients of all inputs."""
    o, ht = op(**inputs, **flags, output_final_state=True)
    torch.manual_seed(43)
    do, dht = (torch.randn(x.shape, device=device) for x in (o, ht))
    grads = torch.autograd.grad((o * do.to(o.dtype)).sum() + (ht * dht.to(ht.dtype)).sum(), list(inputs.values()))
    return {'o': o, 'ht': ht, **{f'd{name}': dx for name, dx in zip(inputs, grads, strict=True)}}


def naive_varlen(cu_seqlens=None, **kwargs):
    """The naive op on each sequence."""
    if cu_seqlens is None:
        return naive_recurrent_longhorn(**kwargs)
    outputs, states = [], []
    for n, (bos, eos) in enumerate(zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True)):
        own = {name: x[:, bos:eos] if isinstance(x, torch.Tensor) and x.dim() > 2 else x for name, x in kwargs.items()}
        own['initial_state'] = kwargs['initial_state'][n:n + 1]
        if bos == eos:
            states.append(own['initial_state'])
            continue
        o, ht = naive_recurrent_longhorn(**own)
        outputs.append(o)
        states.append(ht)
    return torch.cat(outputs, 1), torch.cat(states)


def check(op, inputs, flags, ratio=1e-4):
    """`op` against the naive op in float64."""
    ref = run(naive_varlen, {name: x.detach().double().requires_grad_() for name, x in inputs.items()}, flags)
    tri = run(op, inputs, flags)
    for name, x in tri.items():
        assert x.dtype == (torch.float if name == 'ht' else inputs.get(name[1:], inputs['v']).dtype)
        assert_close(name, ref[name].to(x.dtype), x, ratio)


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize('option', OPTIONS)
def test_options(option: str, op):
    check(op, *make_call(*SIZES, **OPTIONS[option]))


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
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
def test_chunk(B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype, op):
    call = make_call(B, T, H, K, V, dtype=dtype, z=True, D=True, g=True)
    check(op, *call, ratio=1e-4 if dtype == torch.float else 0.01)


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize('lengths', [(15, 20), (32, 1, 0, 17)])
def test_chunk_varlen(lengths: tuple[int, ...], op):
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    inputs, flags = make_call(1, sum(lengths), *SIZES[2:], N=len(lengths), g=True)
    check(op, inputs, {**flags, 'cu_seqlens': cu_seqlens})


def test_without_final_state():
    inputs, flags = make_call(*SIZES)
    assert chunk_longhorn(**inputs, **flags)[1] is None
