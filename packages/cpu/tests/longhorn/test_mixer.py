"""A layer's decoding step in one loop: the layer by the recurrence in float64, and the calls that must not go through it."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from fla.models.utils import Cache

from fla_longhorn import Longhorn
from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn.ops.pool import Pool
from fla_longhorn_cpu import mixer
from fla_longhorn_cpu.token import Mixer, mix_tokens

OPTIONS = {
    'paper': {},
    'exact': {'exact': True},
    'scalar_beta': {'scalar_beta': True, 'num_heads': 2},
    'tied, normalised keys': {'tie_qk': True, 'k_norm': 'l2', 'exact': True},
    'heads': {'num_heads': 4, 'state_size': 20, 'k_norm': 'l2'},
    'odd sizes': {'state_size': 5, 'beta_rank': 3, 'conv_bias': False, 'allow_neg_eigval': True},
    'wide': {'state_size': 40, 'beta_rank': 21},
    'gate of heads': {'gate': 'head', 'num_heads': 3, 'exact': True},
    'all': {'gate': 'head', 'num_heads': 4, 'k_norm': 'l2'},
    'gate of channels': {'gate': 'channel', 'num_heads': 2, 'scalar_beta': True},
}
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def make(name: str, dtype=torch.float32) -> Longhorn:
    torch.manual_seed(0)
    layer = Longhorn(hidden_size=24, layer_idx=0, **OPTIONS[name]).eval()
    for x in layer.parameters():
        torch.nn.init.normal_(x, std=x.shape[-1]**-0.5 if x.dim() > 1 else 1)
    return layer.to(dtype).requires_grad_(False)


def mixer_of(layer: Longhorn) -> Mixer:
    gate = layer.gate
    return Mixer(
        layer.conv1d.weight, layer.conv1d.bias, layer.x_proj.weight, layer.beta_proj.weight, layer.beta_proj.bias, layer.D,
        layer.num_heads, layer.state_size, layer.exact, layer.allow_neg_eigval, getattr(layer.k_norm, 'eps', None),
        gate and (gate.down.weight, gate.up.weight, gate.A_log, gate.dt_bias),
    )


def inputs(layer: Longhorn, N: int, dtype=torch.float32):
    """x and z as the halves of a projection, the convolution's inputs, states."""
    d = layer.intermediate_size
    x, z = torch.randn(N, 1, 2 * d, dtype=dtype).chunk(2, -1)
    return x, z, torch.randn(N, d, 4, dtype=dtype), torch.randn(N, layer.num_heads, layer.state_size, d // layer.num_heads)


def in_float64(layer: Longhorn, x, z, memory, state):
    """The output, and the memory and the state after the token."""
    layer, x, z, memory, state = (y.double() for y in (deepcopy(layer), x, z, memory, state))
    H, (N, _, d) = layer.num_heads, x.shape
    memory = torch.cat([memory[..., 1:], x.mT], -1)
    v = (memory * layer.conv1d.weight.squeeze(1)).sum(-1)
    v = F.silu(v if layer.conv1d.bias is None else v + layer.conv1d.bias)
    b, k, *q = layer.x_proj(v).split(layer.x_sizes, -1)
    q, k = (y.view(N, 1, H, -1) for y in (q[0] if q else k, k))
    if not isinstance(layer.k_norm, torch.nn.Identity):
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta, g = layer.beta_proj(b), None
    if layer.gate is not None:
        by_head = layer.gate.num_channels is None
        g = F.softplus(layer.gate.up(layer.gate.down(v)) + layer.gate.dt_bias).view(N, 1, H, -1)
        g = -g * layer.gate.A_log.exp()[:, None]
        g = g[..., 0] if by_head else g
    o, state = naive_recurrent_longhorn(
        q, k, v.view(N, 1, H, -1), beta.view(N, 1, H) if layer.scalar_beta else beta.view(N, 1, H, -1), exact=layer.exact,
        D=layer.D.view(H, -1), z=z.reshape(N, 1, H, -1), use_beta_sigmoid_in_kernel=True, initial_state=state,
        output_final_state=True, allow_neg_eigval=layer.allow_neg_eigval, g=g,
    )
    return o.view(N, 1, d), memory, state


def assert_near(got, expected, dtype):
    assert (got - expected).norm() <= TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize('dtype', TOLERANCES, ids=str)
@pytest.mark.parametrize('N', [1, 2, 5])
@pytest.mark.parametrize('name', OPTIONS)
@torch.no_grad()
def test_equals_the_recurrence_in_float64(name, N, dtype):
    layer = make(name, dtype)
    x, z, memory, state = inputs(layer, N, dtype)
    versions = memory._version, state._version
    expected = in_float64(layer, x, z, memory, state)
    o = mix_tokens(x, z, mixer_of(layer), memory, Pool(state))
    assert o.shape == x.shape and o.dtype is dtype
    for got, wanted in zip((o, memory, state), expected, strict=True):
        assert_near(got, wanted, dtype)
    assert memory._version > versions[0] and state._version > versions[1]


@pytest.mark.parametrize('name', ['gate of heads', 'gate of channels'])
@torch.no_grad()
def test_softplus_of_large_numbers(name):
    """`exp` of them is infinite in float32."""
    layer = make(name)
    layer.gate.dt_bias.fill_(100.0)
    layer.gate.A_log.fill_(-8.0)
    x, z, memory, state = inputs(layer, 2)
    expected = in_float64(layer, x, z, memory, state)
    assert_near(mix_tokens(x, z, mixer_of(layer), memory, Pool(state)), expected[0], torch.float32)
    assert_near(state, expected[2], torch.float32)


@pytest.mark.parametrize('dtype', TOLERANCES, ids=str)
@pytest.mark.parametrize('final', [None, [1, 3, 5, 0]])
@torch.no_grad()
def test_rows_of_a_pool(final, dtype):
    """As without a pool, to the bit; a sequence without a row gets zeros, other rows stay, and so do gaps between rows."""
    layer = make('heads', dtype)
    d, shape = layer.intermediate_size, torch.Size([layer.num_heads, layer.state_size, layer.head_v_dim])
    x, z, memory, state = inputs(layer, 4, dtype)
    first = torch.tensor([4, 7, 2, -1])
    last = first if final is None else torch.tensor(final)
    pages = torch.randn(6, 3 * d + 8, dtype=dtype)[:, :3 * d].unflatten(1, (3, d))
    states = torch.randn(6, shape.numel() + 8)[:, :shape.numel()].unflatten(1, shape)
    for n, row in ((0, 4), (2, 2)):
        pages[row], states[row] = memory[n, :, 1:].mT, state[n]
    before = pages.clone(), states.clone()
    expected = mix_tokens(x, z, mixer_of(layer), memory, Pool(state))
    pool = Pool(states, first, None if final is None else last, None, 7)
    got = mix_tokens(x, z, mixer_of(layer), pages, pool)
    assert torch.equal(got[::2], expected[::2]) and not got[1::2].any()
    for n in (0, 2):
        assert torch.equal(pages[last[n]], memory[n, :, 1:].mT) and torch.equal(states[last[n]], state[n])
    others = [row for row in range(6) if row not in (last[0], last[2])]
    assert torch.equal(pages[others], before[0][others]) and torch.equal(states[others], before[1][others])


@pytest.mark.parametrize('name', OPTIONS)
@torch.no_grad()
def test_a_row_has_the_same_bits_beside_any_others(name):
    layer = make(name)
    x, z, memory, state = inputs(layer, 5)
    alone = [x[3:4].contiguous(), z[3:4].contiguous(), memory[3:4].clone(), state[3:4].clone()]
    together = mix_tokens(x, z, mixer_of(layer), memory, Pool(state))[3:4]
    assert torch.equal(mix_tokens(*alone[:2], mixer_of(layer), alone[2], Pool(alone[3])), together)
    assert torch.equal(alone[2], memory[3:4]) and torch.equal(alone[3], state[3:4])


def changed(name: str, layer: Longhorn, x, z, memory, state):
    """The arguments of a call that the loop does not take."""
    parts, pool = mixer_of(layer), Pool(state)
    match name:
        case 'float16':
            x, z = x.half(), z.half()
        case 'weights of another dtype':
            parts = parts._replace(x_weight=parts.x_weight.bfloat16())
        case 'weights by columns':
            parts = parts._replace(x_weight=parts.x_weight.t().contiguous().t())
        case 'two tokens':
            x, z = x.expand(-1, 2, -1).contiguous(), z.expand(-1, 2, -1).contiguous()
        case 'strided states':
            pool = Pool(state.mT.contiguous().mT)
        case 'states of 16 bits':
            pool = Pool(state.bfloat16())
        case 'other taps':
            parts, memory = parts._replace(taps=parts.taps[..., 1:].contiguous()), memory[..., 1:].contiguous()
        case 'starts from zero':
            pool = Pool(state, torch.arange(3), None, torch.tensor([True, False, True]))
            memory = memory[..., 1:].mT.contiguous()
        case 'too much work':
            N = mixer.MAX_PRODUCTS // (parts.x_weight.numel() + parts.beta_weight.numel()) + 1
            x, z, memory, state = inputs(layer, N)
            pool = Pool(state)
    return x, z, parts, memory, pool


@pytest.mark.parametrize('name', [
    'float16', 'weights of another dtype', 'weights by columns', 'two tokens', 'strided states', 'states of 16 bits',
    'other taps', 'starts from zero', 'too much work',
])
@torch.no_grad()
def test_left_to_others(name):
    layer = make('paper')
    given = inputs(layer, 3)
    assert mix_tokens(given[0], given[1], mixer_of(layer), given[2].clone(), Pool(given[3].clone())) is not None
    x, z, parts, memory, pool = changed(name, layer, *given)
    before = memory.clone(), pool.states.clone()
    assert mix_tokens(x, z, parts, memory, pool) is None
    assert torch.equal(memory, before[0]) and torch.equal(pool.states, before[1])


def decode(layer: Longhorn, h: torch.Tensor) -> torch.Tensor:
    cache = Cache()
    return torch.cat([layer(h[:, t:t + 1], past_key_values=cache, use_cache=True)[0] for t in range(h.shape[1])], 1)


@pytest.fixture
def calls(monkeypatch) -> list:
    """What the loop returned to the layer, a call each."""
    found, loop = [], mixer.mix_tokens

    def mix(*args):
        found.append(loop(*args))
        return found[-1]

    monkeypatch.setattr(mixer, 'mix_tokens', mix)
    return found


@pytest.mark.parametrize('name', OPTIONS)
@torch.no_grad()
def test_decoding_takes_the_loop(name, calls):
    layer, h = make(name), torch.randn(3, 6, 24)
    expected, got = layer(h)[0], decode(layer, h)
    # the first token has no states before it
    assert len(calls) == 5 and all(o is not None for o in calls)
    assert_near(got, expected, torch.float32)
