"""A plain token takes the short way, and gets what the other way gives, bit for bit."""

import pytest
import torch
from fla.models import GatedDeltaNetConfig, GLAConfig, HGRN2Config, RWKV7Config
from fla.models.utils import Cache
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from fla_longhorn import LonghornConfig
from fla_longhorn.layers import longhorn, token
from fla_longhorn.ops import operator
from fla_longhorn.ops.plain import is_plain

SIZES = dict(hidden_size=32, num_hidden_layers=2, vocab_size=64, bos_token_id=1, eos_token_id=2)
SWAPPED = dict(num_heads=2, attn_mode='longhorn')
CONFIGS = {
    'plain': lambda: LonghornConfig(**SIZES),
    'exact': lambda: LonghornConfig(**SIZES, exact=True, num_heads=2),
    'scalar': lambda: LonghornConfig(**SIZES, scalar_beta=True, num_heads=2),
    'options': lambda: LonghornConfig(**SIZES, k_norm='l2', hidden_ratio=4, conv_bias=False, use_bias=True),
    'projections': lambda: LonghornConfig(**SIZES, tie_qk=True, value_proj=True, num_heads=2),
    'unfused': lambda: LonghornConfig(**SIZES, fuse_norm=False, fuse_swiglu=False, hidden_ratio=4),
    'hybrid': lambda: LonghornConfig(**SIZES, attn={'layers': [1], 'num_heads': 2}),
    'gla': lambda: GLAConfig(**SIZES, **SWAPPED),
    'gated_deltanet': lambda: GatedDeltaNetConfig(**SIZES, **SWAPPED, head_dim=16),
    'hgrn2': lambda: HGRN2Config(**SIZES, **SWAPPED),
    'rwkv7': lambda: RWKV7Config(**SIZES, head_dim=16, attn_mode='longhorn'),
}


class Watching(TorchFunctionMode):
    """Changes nothing, but sees each function of PyTorch, so that no call below it is plain."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def continue_prompt(model, ids, mask):
    """Logits after a prompt, of tokens that are looked at, of tokens that are read, and of a piece; the states at the end."""
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    results = []
    for t in range(3):
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        for use_cache in (False, True):
            output = model(ids[:, t:t + 1], attention_mask=mask, past_key_values=cache, use_cache=use_cache)
            results.append(output.logits)
    results.append(model(ids[:, :1]).logits)
    assert cache.get_seq_length() == ids.shape[1] + 3
    return results + [x.clone() for layer in cache for x in (layer['recurrent_state'], layer['conv_state']) if x is not None]


@pytest.fixture
def taken(monkeypatch):
    """The layers that took the short way."""
    layers = []
    mix_token = longhorn.mix_token
    monkeypatch.setattr(longhorn, 'mix_token', lambda layer, *args: layers.append(layer) or mix_token(layer, *args))
    return layers


@pytest.mark.parametrize('padding', [None, 'none in the mask', 'left'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', list(CONFIGS))
@torch.no_grad()
def test_same_bits(name, dtype, padding, taken, device):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(device, dtype).eval()
    ids = torch.randint(3, 64, (3, 7), device=device)
    mask = None if padding is None else torch.ones_like(ids)
    if padding == 'left':
        mask[0, :3] = 0
    got = continue_prompt(model, ids, mask)
    mixers = 1 if name == 'hybrid' else 2
    assert len(taken) == 7 * mixers
    with Watching():
        expected = continue_prompt(model, ids, mask)
    assert len(taken) == 7 * mixers
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize('name', ['plain', 'exact'])
@torch.no_grad()
def test_same_bits_in_pytorch(name, taken, monkeypatch, device):
    """The backend that runs everywhere."""
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'torch')
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(device).eval()
    ids = torch.randint(3, 64, (3, 7)).to(device)
    got = continue_prompt(model, ids, None)
    with Watching():
        expected = continue_prompt(model, ids, None)
    assert len(taken) == 7 * 2 and all(map(torch.equal, got, expected))


@torch.no_grad()
def test_parameters_of_other_types(monkeypatch, device):
    """Such as DTensors, whose memory is not theirs: kernels don't get them past the operator."""
    layer, h = longhorn.Longhorn(hidden_size=16, layer_idx=0).to(device), torch.randn(2, 4, 16, device=device)
    cache = Cache()
    layer(h[:, :3], past_key_values=cache, use_cache=True)
    layer.D = torch.nn.Parameter(torch.Tensor._make_subclass(type('Own', (torch.Tensor,), {}), layer.D.data))
    monkeypatch.setattr(token, 'step_states', None)
    got = layer(h[:, 3:], past_key_values=cache, use_cache=True)[0]
    assert (got - layer(h)[0][:, 3:]).abs().max() < 1e-5


class Own(torch.Tensor):
    """Sees the functions of PyTorch that are called with it, as a quantised weight does."""

    seen: list = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        cls.seen.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def tell(seen):
    """A hook."""
    def hook(module, args, *output):
        if isinstance(module, torch.nn.Linear):
            seen.append(tuple(args[0].shape))

    return hook


def stand_around(kind, linear, seen, monkeypatch):
    """Put something around one linear layer or all of them; what it sees goes to `seen`."""
    if kind == 'hook':
        linear.register_forward_hook(tell(seen))
    elif kind == 'hook before':
        linear.register_forward_pre_hook(tell(seen))
    elif kind == 'hook of all':
        monkeypatch.setitem(torch.nn.modules.module._global_forward_hooks, 0, tell(seen))
    elif kind == 'forward':
        linear.forward = lambda x: seen.append(tuple(x.shape)) or type(linear).forward(linear, x)
    elif kind == 'forward of all':
        forward = torch.nn.Linear.forward
        monkeypatch.setattr(torch.nn.Linear, 'forward', lambda self, x: seen.append(tuple(x.shape)) or forward(self, x))
    elif kind == 'class':
        def call(self, x):
            seen.append(tuple(x.shape))
            return torch.nn.Linear.forward(self, x)

        linear.__class__ = type('Adapted', (torch.nn.Linear,), {'forward': call})
    else:
        monkeypatch.setattr(Own, 'seen', seen)
        linear.weight = torch.nn.Parameter(linear.weight.data.as_subclass(Own), requires_grad=False)


@pytest.mark.parametrize('kind', ['hook', 'hook before', 'hook of all', 'forward', 'forward of all', 'class', 'weight'])
@pytest.mark.parametrize('name, shape', [('in_proj', (2, 1, 16)), ('x_proj', (2, 1, 32)), ('beta_proj', (2, 1))])
@torch.no_grad()
def test_what_stands_around_a_projection(kind, name, shape, monkeypatch, device):
    """Hooks, adapters and quantised weights see the calls of a token; what changes nothing changes no bit."""
    layer, h = longhorn.Longhorn(hidden_size=16, layer_idx=0).to(device), torch.randn(2, 4, 16, device=device)
    cache, other, seen = Cache(), Cache(), []
    for states in (cache, other):
        layer(h[:, :3], past_key_values=states, use_cache=True)
    expected = layer(h[:, 3:], past_key_values=other, use_cache=True)[0]
    stand_around(kind, getattr(layer, name), seen, monkeypatch)
    got = layer(h[:, 3:], past_key_values=cache, use_cache=True)[0]
    if kind == 'weight':
        # PyTorch multiplies three dimensions by such a weight in another order
        assert 'linear' in seen and (got - expected).abs().max() < 1e-7
    else:
        assert shape in seen and torch.equal(got, expected)


@torch.no_grad()
def test_parameters_that_are_no_parameters(device):
    """FSDP1 puts tensors in their place while a block runs."""
    model = AutoModelForCausalLM.from_config(CONFIGS['options']()).to(device).eval()
    ids = torch.randint(3, 64, (3, 7), device=device)
    expected = continue_prompt(model, ids, None)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            setattr(module, name, parameter.detach())
    assert not list(model.parameters())
    got = continue_prompt(model, ids, None)
    assert all(map(torch.equal, got, expected))


@torch.no_grad()
def test_autocast(taken, device, monkeypatch):
    """Linear layers are called, whose weights are cast once and not at each token."""
    monkeypatch.setattr(torch, 'mm', None)
    monkeypatch.setattr(torch, 'addmm', None)
    model = AutoModelForCausalLM.from_config(CONFIGS['options']()).to(device).eval()
    ids = torch.randint(3, 64, (3, 7), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        got = continue_prompt(model, ids, None)
        assert len(taken) == 14
        with Watching():
            expected = continue_prompt(model, ids, None)
    assert len(taken) == 14 and got[0].dtype == torch.bfloat16
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize('num_beams', [1, 3])
@pytest.mark.parametrize('name', ['plain', 'gla'])
def test_generate(name, num_beams, taken, device):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(device).eval()
    ids = torch.randint(3, 64, (2, 5), device=device)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5], device=device)
    lengths = dict(max_new_tokens=5, min_new_tokens=5)
    options = dict(attention_mask=mask, num_beams=num_beams, do_sample=False, pad_token_id=0, **lengths)
    got = model.generate(ids, **options)
    assert len(taken) == 4 * 2
    with Watching():
        assert torch.equal(got, model.generate(ids, **options))


@torch.no_grad()
def test_padding_at_the_end_takes_the_other_way(taken, device):
    model = AutoModelForCausalLM.from_config(CONFIGS['plain']()).to(device).eval()
    ids = torch.randint(3, 64, (3, 1), device=device)
    cache = model(ids, use_cache=True).past_key_values
    before = [layer['recurrent_state'].clone() for layer in cache]
    taken.clear()
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]], device=device)
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    assert not taken
    assert all(torch.equal(x['recurrent_state'][1], state[1]) for x, state in zip(cache, before, strict=True))


def test_what_is_plain(device):
    x = torch.ones(2, device=device)
    assert not is_plain(x)
    with torch.no_grad():
        assert is_plain(x, None, torch.nn.Parameter(x))
        assert not is_plain(x.to('meta')) and not is_plain(x, 1) and not is_plain(torch.complex(x, x).conj().imag)
        assert not is_plain(torch.Tensor._make_subclass(type('Own', (torch.Tensor,), {}), x))
        for mode in (Watching(), torch._subclasses.FakeTensorMode(), torch.autograd.forward_ad.dual_level()):
            with mode:
                assert not is_plain(x)
        assert torch.func.vmap(lambda y: y * float(is_plain(y)))(x).sum() == 0
        assert torch.jit.trace(lambda y: y * float(is_plain(x)), (x,), check_trace=False)(x).sum() == 0
        assert torch.compile(lambda y: y * float(is_plain(y)), backend='eager', fullgraph=True)(x).sum() == 0


@torch.no_grad()
def test_an_update_in_place_is_seen_by_autograd(device, monkeypatch):
    monkeypatch.setattr(operator, 'longhorn_update', None)
    model = longhorn.Longhorn(hidden_size=16).to(device)
    q, k = torch.randn(2, 2, 1, 1, 16, device=device)
    v, beta = torch.rand(2, 2, 1, 1, 8, device=device)
    state = torch.ones(2, 1, 16, 8, device=device)
    with torch.enable_grad():
        weight = torch.ones_like(state, requires_grad=True)
        loss = (weight * state).sum()
    longhorn.longhorn_state_update(state, q, k, v, beta, D=model.D[None, :8])
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


@torch.no_grad()
def test_wrong_arguments_after_right_ones(device):
    """What the checks remember is no pass for anything else."""
    q, k = torch.randn(2, 2, 1, 1, 16, device=device)
    v, beta = torch.rand(2, 2, 1, 1, 8, device=device)
    state = torch.zeros(2, 1, 16, 8, device=device)
    for _ in range(2):
        longhorn.longhorn_state_update(state, q, k, v, beta)
        longhorn.fused_recurrent_longhorn(q, k, v, beta, initial_state=state)
    for wrong, argument in (
        (dict(k=k[..., :8]), 'k'), (dict(v=v[:1]), 'v'), (dict(beta=beta.double()), 'beta'), (dict(exact=1), 'exact'),
        (dict(scale='1'), 'scale'), (dict(q=None), 'q'), (dict(z=v[..., :4]), 'z'), (dict(state_v_first=True), 'state'),
        (dict(state=state.half()), 'state'), (dict(state=state.mT.contiguous().mT), 'state'),
        (dict(pad_slot_id=True), 'pad_slot_id'),
    ):
        arguments = {**dict(state=state, q=q, k=k, v=v, beta=beta), **wrong}
        with pytest.raises((TypeError, ValueError), match=f'^{argument} must '):
            longhorn.longhorn_state_update(**arguments)
