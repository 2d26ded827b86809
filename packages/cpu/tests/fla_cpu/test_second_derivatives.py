"""Second derivatives of everything of fla's and ours that has a backward on the CPU: right, or an error that says so."""

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import fla.modules
import pytest
import torch
import torch.nn.functional as F
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss, activations
from fla.modules.activations import ops
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.l2warp import l2_warp
from fla.modules.norm import fused_norm_gate, l2norm, layernorm
from fla.modules.rotary import rotary_embedding
from fla.modules.token_shift import token_shift

from fla_longhorn.layers import Longhorn
from fla_longhorn.modules import GatedMLP, L2Norm, RMSNorm, ShortConvolution
from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn
from packages.cpu.tests.fla_cpu.test_activations import power_unit
from packages.cpu.tests.fla_cpu.test_rotary import rotate, tables
from packages.cpu.tests.fla_cpu.test_rwkv import shift
from tests.reference import assert_close, strided, tensor

# whose forward needs a GPU, or several ranks
ELSEWHERE = {
    'SwiGLULinearFunctionNPU', 'PowGLULinearFunctionNPU', 'CrossEntropyLossFunctionNPU', 'GrpoLossNPU', 'GrpoLoss',
    'LayerNormFn', 'LayerNormLinearQuantFunction', 'SigmoidGLUFunction', 'SigmoidGLULinearFunction', 'TokenShiftCPFunction',
    'CausalConv1dFunctionCP', 'ConvBoundaryExchangeFunction', 'FastCausalConv1dFn', 'FusedKLDivLossFunction',
}
COS, SIN = tables(8, 2, torch.float32)
TARGET, SOME_IGNORED = torch.tensor([3, 0, 4]), torch.tensor([3, -100, 4])


@dataclass
class Case:
    """A function of tensors, and what it computes in PyTorch; without that, it has no second derivative."""

    function: Callable[..., torch.Tensor]
    # fla's autograd function that it calls
    calls: str | None
    inputs: Callable[[], list[torch.Tensor]] = lambda: [strided(2, 3)]
    reference: Callable[..., torch.Tensor] | None = None
    # what the error tells to call instead
    instead: str = 'naive_recurrent_longhorn'


def units() -> list[torch.Tensor]:
    return [strided(2, 3), strided(2, 3)]


def linears() -> list[torch.Tensor]:
    return [strided(2, 3), strided(2, 3), strided(2, 3), tensor(2)]


def norms(*more: int) -> list[torch.Tensor]:
    """The input `[2, 4]`, then those of `more` sizes."""
    return [strided(2, 4), *(tensor(size) for size in more)]


def linear_norms() -> list[torch.Tensor]:
    return [*norms(4, 4), tensor(3, 4), tensor(3)]


def gated(*more: int) -> list[torch.Tensor]:
    return [strided(2, 4), *norms(*more)]


def operands() -> list[torch.Tensor]:
    return [strided(1, 3, 1, 2), strided(1, 3, 1, 2), strided(1, 3, 1, 2), torch.rand(1, 3, 1, 2).requires_grad_()]


def module(cls: type, *args: Any, **options: Any) -> Callable:
    """A call of a new module with the same weights each time."""
    def call(x):
        torch.manual_seed(3)
        built = cls(*args, **options)
        y = built(x)
        return y[0] if isinstance(y, tuple) else y

    return call


def gelu(x):
    return F.gelu(x, approximate='tanh')


FUNCTIONS = {
    'sigmoid': Case(ops.sigmoid, 'SigmoidFunction', reference=torch.sigmoid),
    'logsigmoid': Case(lambda x: ops.logsigmoid(x, 2.), 'LogSigmoidFunction', reference=lambda x: F.logsigmoid(x) / 2),
    'swish': Case(ops.swish, 'SwishFunction', reference=F.silu),
    'elu_p1': Case(activations.ELUPlusOneFunction.apply, 'ELUPlusOneFunction', reference=lambda x: F.elu(x) + 1),
    'sqrelu': Case(ops.sqrelu, 'SquaredReLUFunction', reference=lambda x: F.relu(x).square()),
    'fast_gelu': Case(ops.fast_gelu_impl, 'FastGeLUFunction', reference=gelu),
    'bias_gelu': Case(
        ops.bias_gelu_impl, 'GeLUFunction', lambda: [tensor(2, 3), tensor(3)], lambda x, b: gelu(x + b),
    ),
    'swiglu': Case(ops.swiglu, 'SwiGLUFunction', units, lambda x, y: F.silu(x) * y),
    'powglu': Case(ops.powglu, 'PowGLUFunction', units, power_unit),
    'swiglu_linear': Case(ops.swiglu_linear, 'SwiGLUFunction', linears, lambda x, y, w, b: F.linear(F.silu(x) * y, w, b)),
    'powglu_linear': Case(ops.powglu_linear, 'PowGLUFunction', linears, lambda x, y, w, b: F.linear(power_unit(x, y), w, b)),
    'SwiGLULinearFunction': Case(
        ops.SwiGLULinearFunction.apply, 'SwiGLULinearFunction', linears, lambda x, y, w, b: F.linear(F.silu(x) * y, w, b),
    ),
    'PowGLULinearFunction': Case(
        lambda *x: ops.PowGLULinearFunction.apply(*x, 3.0), 'PowGLULinearFunction', linears,
        lambda x, y, w, b: F.linear(power_unit(x, y), w, b),
    ),
    'rotary': Case(
        lambda x: rotary_embedding(x, COS.to(x), SIN.to(x)), 'RotaryEmbeddingFunction', lambda: [strided(1, 3, 1, 5)],
        lambda x: rotate(x, COS.to(x), SIN.to(x), torch.arange(3)[None], False),
    ),
    'rotary in place': Case(
        lambda x: rotary_embedding(x * 1, COS.to(x), SIN.to(x), inplace=True), 'RotaryEmbeddingFunction',
        lambda: [strided(1, 3, 1, 5)], lambda x: rotate(x, COS.to(x), SIN.to(x), torch.arange(3)[None], False),
    ),
    'token_shift': Case(
        lambda x, cache: torch.cat([y.flatten() for y in token_shift(x, cache=cache, output_cache=True)]), 'TokenShift',
        lambda: [strided(2, 3, 2), tensor(2, 2)], lambda x, cache: torch.cat([y.flatten() for y in shift(x, cache=cache)]),
    ),
    'layer_norm': Case(layernorm.layer_norm, 'LayerNormFunction', lambda: norms(4, 4), instead='fuse_norm=False'),
    'rms_norm': Case(
        lambda x, w: layernorm.rms_norm(x, w, None), 'LayerNormFunction', lambda: norms(4), instead='fuse_norm=False',
    ),
    'group_norm': Case(
        lambda x, w, b: layernorm.group_norm(x, w, b, num_groups=2), 'LayerNormFunction', lambda: norms(4, 4),
        instead='fuse_norm=False',
    ),
    'residual': Case(
        lambda x, w, r: torch.cat(layernorm.rms_norm(x, w, None, residual=r.expand_as(x), prenorm=True)), 'LayerNormFunction',
        lambda: norms(4, 4), instead='fuse_norm=False',
    ),
    'layer_norm_linear': Case(
        layernorm.layer_norm_linear, 'LayerNormLinearFunction', linear_norms, instead='fuse_norm=False',
    ),
    'layer_norm_gated': Case(
        fused_norm_gate.layer_norm_gated, 'LayerNormGatedFunction', lambda: gated(4, 4), instead='fuse_norm=False',
    ),
    'rms_norm_gated': Case(
        lambda x, g, w: fused_norm_gate.rms_norm_gated(x, g, w, None, 'sigmoid'), 'LayerNormGatedFunction', lambda: gated(4),
        instead='fuse_norm=False',
    ),
    'layer_norm_swish_gate_linear': Case(
        fused_norm_gate.layer_norm_swish_gate_linear, 'LayerNormGatedLinearFunction', lambda: [strided(2, 4), *linear_norms()],
        instead='fuse_norm=False',
    ),
    'l2norm': Case(l2norm.l2norm, 'L2NormFunction', norms, instead='torch.nn.functional.normalize'),
    'cross entropy': Case(
        lambda x: FusedCrossEntropyLoss()(x * 1, TARGET), 'FusedCrossEntropyFunction', lambda: [strided(3, 5)],
        instead='fuse_cross_entropy=False',
    ),
    'cross entropy in place': Case(
        lambda x: FusedCrossEntropyLoss(inplace_backward=True)(x * 1, TARGET), 'FusedCrossEntropyFunction',
        lambda: [strided(3, 5)], instead='fuse_cross_entropy=False',
    ),
    'linear cross entropy': Case(
        lambda x, w, b: FusedLinearCrossEntropyLoss()(x[None], TARGET[None], w, b), 'FusedLinearCrossEntropyFunction',
        lambda: [strided(3, 2), tensor(5, 2), tensor(5)], instead='fuse_linear_cross_entropy=False',
    ),
    'linear cross entropy, some ignored': Case(
        lambda x, w: FusedLinearCrossEntropyLoss()(x[None], SOME_IGNORED[None], w), 'FusedLinearCrossEntropyFunction',
        lambda: [strided(3, 2), tensor(5, 2)], instead='fuse_linear_cross_entropy=False',
    ),
    'l2_warp': Case(
        lambda x: l2_warp(x.square().mean(), x), 'L2Wrap', lambda: [strided(1, 3, 4)], instead='use_l2warp=False',
    ),
    'convolution': Case(
        lambda x, w, b: causal_conv1d(x, w, b)[0], 'CausalConv1dFunction',
        lambda: [strided(1, 5, 16), tensor(16, 4), tensor(16)], instead='torch.nn.functional.conv1d',
    ),
    'convolution, silu': Case(
        lambda x, w, h: causal_conv1d(x, w, initial_state=h, activation='silu')[0], 'CausalConv1dFunction',
        lambda: [strided(1, 3, 2), tensor(2, 3), tensor(1, 2, 3)], instead='torch.nn.functional.conv1d',
    ),
    'our norm': Case(module(RMSNorm, 4), 'LayerNormFunction', norms, instead='fuse_norm=False'),
    'our l2 norm': Case(module(L2Norm), 'L2NormFunction', norms, instead='torch.nn.functional.normalize'),
    'our convolution': Case(
        module(ShortConvolution, 2, 4, activation='silu'), 'CausalConv1dFunction', lambda: [strided(1, 3, 2)],
        instead='torch.nn.functional.conv1d',
    ),
    'our mlp': Case(module(GatedMLP, 4), 'SwiGLUFunction', norms, lambda x: mlp_in_pytorch(x)),
    **{
        f'{op.__name__}, exact={exact}': Case(
            lambda *x, op=op, exact=exact: op(*x, exact=exact)[0], None, operands,
        ) for op in (chunk_longhorn, fused_recurrent_longhorn) for exact in (False, True)
    },
    'naive': Case(
        lambda *x: naive_recurrent_longhorn(*x)[0], None, operands, lambda *x: naive_recurrent_longhorn(*x)[0],
    ),
    'layer': Case(
        module(Longhorn, hidden_size=8, state_size=4, recompute=False), None, lambda: [tensor(1, 3, 8)], instead='torch.func',
    ),
}


def mlp_in_pytorch(x):
    torch.manual_seed(3)
    mlp = GatedMLP(4).to(x.dtype)
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def squares(y):
    return y.square().sum()


def weights(y):
    """The gradient of `y` depends on nothing."""
    return (y * torch.arange(1, y.numel() + 1).view(y.shape).to(y)).sum()


def products(function, inputs):
    """Hessian times a vector, as gradient of the gradient."""
    gradients = torch.autograd.grad(function(*inputs), inputs, create_graph=True)
    return torch.autograd.grad(gradients, inputs, [x.detach().cos() for x in inputs], allow_unused=True)


def penalty(function, inputs):
    """A gradient penalty, by `backward`."""
    (gradient,) = torch.autograd.grad(function(*inputs), inputs[:1], create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), inputs, allow_unused=True)


def twice(function, inputs):
    """`loss.backward(create_graph=True)`, as AdaHessian calls it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    function(*leaves).backward(create_graph=True)
    return torch.autograd.grad(sum(x.grad.sum() for x in leaves), leaves, allow_unused=True)


def plain(name):
    def run(function, inputs):
        inputs, call = tuple(x.detach() for x in inputs), getattr(torch.autograd.functional, name)
        if name == 'hessian':
            return [x for row in call(function, inputs) for x in row]
        return call(function, inputs, tuple(x.cos() for x in inputs))[1]

    return run


WAYS = {
    'grad of grad': products, 'penalty': penalty, 'backward twice': twice,
    **{name: plain(name) for name in ('hessian', 'hvp', 'vhp')},
}


def scalar(function: Callable, reduce: Callable) -> Callable:
    """With a term of its own in each input, so that each gradient needs one."""
    return lambda *x: reduce(function(*x)) + sum((y ** 3).sum() for y in x)


@pytest.fixture(autouse=True)
def uncompiled():
    """What fla compiles takes a C++ compiler on a CPU."""
    with torch.compiler.set_stance('force_eager'):
        yield


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('name', FUNCTIONS)
def test_second_derivatives(name, way):
    torch.manual_seed(0)
    case, run = FUNCTIONS[name], WAYS[way]
    inputs = case.inputs()
    for reduce in (squares, weights):
        function = scalar(case.function, reduce)
        if case.reference is None:
            with pytest.raises(RuntimeError, match=f'no second derivative.*{case.instead}'):
                run(function, inputs)
            continue
        wanted = run(scalar(case.reference, reduce), [x.detach().double().requires_grad_() for x in inputs])
        for i, (got, want) in enumerate(zip(run(function, inputs), wanted, strict=True)):
            if got is None:
                assert want is None or not want.any()
            else:
                assert_close(f'{i}, {reduce.__name__}', got, torch.zeros_like(got) if want is None else want, 1e-5)


def called(x: torch.Tensor) -> set[str]:
    """The names of the autograd functions before `x`."""
    found, nodes = set(), [x.grad_fn]
    while nodes:
        node = nodes.pop()
        found.add(node.name().removesuffix('Backward'))
        nodes += [node for node, _ in node.next_functions if node is not None]
    return found


def test_every_function_of_fla_is_here():
    """A function that fla adds shows, and a case that calls another than it says."""
    for _, name, _ in pkgutil.walk_packages(fla.modules.__path__, 'fla.modules.'):
        # those of other accelerators
        with suppress(ImportError):
            importlib.import_module(name)
    known = {
        cls.__name__ for cls in torch.autograd.Function.__subclasses__() if cls.__module__.startswith('fla.modules.')
    }
    for name, case in FUNCTIONS.items():
        assert case.calls is None or case.calls in called(case.function(*case.inputs())), name
    assert {case.calls for case in FUNCTIONS.values()} - {None} == known - ELSEWHERE
