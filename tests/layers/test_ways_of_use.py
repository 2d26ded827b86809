"""Ways in which people use a layer: each gives the gradients of the same layer in plain PyTorch, in float64."""

import copy
import functools
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from fla_longhorn.layers import Longhorn
from fla_longhorn.selfcheck.compare import relative_error
from tests.layers.reference import LAYERS, WIDTH, Reference, Use, replicate


def loss(o: torch.Tensor) -> torch.Tensor:
    return (o * torch.linspace(-1, 1, WIDTH, dtype=o.dtype, device=o.device)).square().sum()


def grads(*modules: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def once(use):
    layer, x = use.layer(), use.x().requires_grad_()
    loss(layer(x)[0]).backward()
    return [*grads(layer), x.grad]


def again(use):
    """ALBERT, looped models."""
    layer, x = use.layer(), use.x()
    for _ in range(3):
        x = x + layer(x)[0]
    loss(x).backward()
    return grads(layer)


def shared(use):
    """By two models."""
    layer, other = use.layer(), use.layer()
    loss(layer(other(use.x())[0])[0]).backward()
    (loss(layer(use.x(1))[0]) + loss(other(use.x(2))[0])).backward()
    return grads(layer, other)


def replicas(use):
    layer = use.layer()
    for seed in (0, 1):
        loss(replicate(layer)(use.x(seed))[0]).backward()
    return grads(layer)


def distributed(use):
    layer = use.layer()
    loss(DistributedDataParallel(layer)(use.x())[0]).backward()
    return grads(layer)


def flat(use, use_orig_params=False, auto_wrap_policy=None):
    """FSDP 1; a step of its optimizer stands for gradients that it keeps in one tensor."""
    layer = FullyShardedDataParallel(
        use.layer(), use_orig_params=use_orig_params, auto_wrap_policy=auto_wrap_policy,
        sharding_strategy=ShardingStrategy.NO_SHARD, device_id=use.to['device'],
    )
    loss(layer(use.x())[0]).backward()
    with torch.no_grad():
        for p in layer.parameters():
            p.sub_(p.grad) if p.grad is not None else None
    with FullyShardedDataParallel.summon_full_params(layer, writeback=False):
        return [p.detach().clone() for p in layer.parameters()]


def sharded(use):
    """FSDP 2."""
    layer, device = use.layer(), torch.device(use.to['device']).type
    fully_shard(layer, mesh=DeviceMesh(device, [0]))
    for seed in (0, 1):
        loss(layer(use.x(seed))[0]).backward()
    return [x.full_tensor() for x in grads(layer)]


def hooks_on_parameters(use):
    layer, calls = use.layer(), []
    for i, p in enumerate(layer.parameters()):
        p.register_hook(lambda g, i=i: 0.5 * g if i % 2 else -g - 0.1)
        p.register_hook(lambda g, i=i: calls.append(i))
    register_multi_grad_hook([*layer.parameters()], lambda found: calls.append(len(found)))
    loss(layer(use.x())[0]).backward()
    assert sorted(calls) == [*range(len(grads(layer))), len(grads(layer))]
    return grads(layer)


def hooks_on_modules(use):
    """Of parts whose modules the reference calls too."""
    layer, seen = use.layer(), []
    for name in ('in_proj', 'x_proj', 'beta_proj', 'out_proj'):
        part = layer.get_submodule(name)
        part.register_forward_hook(lambda module, args, y: 1.5 * y)
        part.register_full_backward_hook(lambda module, dx, dy: (2 * dx[0],))
        part.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel()))
    x = use.x().requires_grad_()
    loss(layer(x)[0]).backward()
    return [*grads(layer), x.grad, torch.tensor(seen)]


def hooks_on_outputs(use):
    layer, x = use.layer(), use.x().requires_grad_()
    layer.register_full_backward_hook(lambda module, dx, dy: (3 * dx[0],))
    o = layer(x)[0]
    o.register_hook(lambda g: g.clamp(-1, 1))
    loss(o).backward()
    return [*grads(layer), x.grad]


def grads_of(layer, use, *more):
    loss(layer(use.x())[0]).backward()
    return grads(layer, *more)


def tied_inside(use):
    layer = use.layer()
    layer.conv1d.register_parameter('bias', layer.D)
    if not layer.scalar_beta:
        layer.beta_proj.bias = layer.D
    return grads_of(layer, use)


def tied_between(use):
    layer, other = use.layer(), use.layer()
    for name in ('in_proj', 'conv1d', 'beta_proj'):
        setattr(other, name, layer.get_submodule(name))
    other.D = layer.D
    loss(layer(other(use.x())[0])[0]).backward()
    return grads(layer, other)


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x.tanh()


def parametrised(use):
    layer = use.layer()
    for module, name in ((layer.conv1d, 'weight'), (layer.beta_proj, 'weight'), (layer, 'D'), (layer.out_proj, 'weight')):
        parametrize.register_parametrization(module, name, Tanh())
    return grads_of(layer, use)


def pruned(use):
    layer = use.layer()
    for part in (layer.x_proj, layer.beta_proj, layer.in_proj):
        prune.l1_unstructured(part, 'weight', amount=0.3)
    return grads_of(layer, use)


def plain_tensors(use):
    """Weights that another network computes."""
    layer, sources = use.layer(), []
    for module in list(layer.modules()):
        for name, p in list(module._parameters.items()):
            if p is not None:
                sources.append(p.detach().clone().requires_grad_())
                delattr(module, name)
                setattr(module, name, sources[-1].sin() + sources[-1])
    loss(layer(use.x())[0]).backward()
    return [p.grad for p in sources]


def functional(use):
    layer = use.layer()
    weights = {name: (1.5 * p).detach().requires_grad_() for name, p in layer.named_parameters()}
    o = torch.func.functional_call(layer, weights, (use.x(),))[0]
    loss(o).backward()
    return [p.grad for p in weights.values()]


def transforms(use):
    """`grad`, `vmap` over weights, `jvp`."""
    layer = use.layer()
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def value(weights, x):
        return loss(torch.func.functional_call(layer, weights, (x,))[0])

    xs = torch.stack([use.x(0), use.x(1)])
    of_each = torch.func.vmap(torch.func.grad(value), (None, 0))(weights, xs)
    _, tangent = torch.func.jvp(lambda x: layer(x)[0], (use.x(),), (use.x(1),))
    return [*of_each.values(), tangent.detach()]


def deep_copies(use):
    layer = use.layer()
    o = layer(use.x())[0]
    other = copy.deepcopy(layer)
    loss(other(use.x(1))[0]).backward()
    loss(o).backward()
    return grads(layer, other)


def in_threads(run, count=3):
    failures = []

    def guarded(i):
        try:
            run(i)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def threads(use):
    """Each with a graph of its own, then all in one."""
    layer, found = use.layer(), [None] * 6
    weights = [*layer.parameters()]

    def alone(i):
        found[i] = torch.autograd.grad(loss(layer(use.x(i))[0]), weights)

    in_threads(alone)
    o = layer(use.x())[0]

    def together(i):
        for _ in range(4):
            found[3 + i] = torch.autograd.grad(loss((i + 1) * o), weights, retain_graph=True)

    in_threads(together)
    return [g for gs in found for g in gs]


def checkpoints(use, use_reentrant):
    layer, x = use.layer(), use.x().requires_grad_()
    o = checkpoint(lambda x: layer(layer(x)[0])[0], x, use_reentrant=use_reentrant)
    loss(o).backward()
    return [*grads(layer), x.grad]


def checkpoints_in_checkpoints(use):
    layer, x = use.layer(), use.x().requires_grad_()

    def inner(x):
        return checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)

    with save_on_cpu():
        o = checkpoint(lambda x: inner(inner(x)), x, use_reentrant=False)
    loss(o).backward()
    return [*grads(layer), x.grad]


def offloaded(use):
    layer = use.layer()
    with save_on_cpu():
        o = layer(use.x())[0]
    loss(o).backward()
    return grads(layer)


def retained(use):
    """Several times, in parts, of several outputs."""
    layer, x = use.layer(), use.x().requires_grad_()
    o = layer(x)[0]
    loss(o).backward(retain_graph=True)
    parts = [torch.autograd.grad(loss(o[:, i:]), p, retain_graph=True)[0] for i, p in enumerate([x, *layer.parameters()])]
    o[:, ::2].sum().backward(retain_graph=True)
    torch.autograd.backward([o[:, 1:].sum(), loss(o)], inputs=[x, layer.D, layer.conv1d.weight])
    return [*parts, *grads(layer), x.grad]


def accumulated(use):
    """Of several rows, by one backward after all forwards."""
    layer = use.layer()
    outputs = [layer(use.x(i))[0] for i in range(3)]
    sum(map(loss, outputs)).backward()
    return grads(layer)


def adapters(use):
    layer = use.layer()
    names = ['in_proj', 'x_proj', 'beta_proj', 'out_proj']
    model = get_peft_model(layer, LoraConfig(target_modules=names, r=2, init_lora_weights=False)).to(**use.to)
    generator = torch.Generator().manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    x = use.x().requires_grad_()
    loss(layer(x)[0]).backward()
    return [*(p.grad for p in trained), x.grad]


def frozen(use):
    """Each part alone trained, and each alone frozen."""
    layer, found = use.layer(), []
    for p in layer.parameters():
        for trained in (True, False):
            layer.requires_grad_(not trained)
            p.requires_grad_(trained)
            layer.zero_grad()
            found += [g for g in grads_of(layer, use) if g is not None]
    return found


def inferred_first(use):
    layer = use.layer()
    with torch.inference_mode():
        layer(use.x(1))
    with torch.no_grad():
        layer(use.x(2))
    return grads_of(layer, use)


def with_weights_of_inference(use):
    """A frozen part whose weights were made in inference mode; what lies behind it is trained."""
    layer = use.layer()
    for name in ('in_proj', 'conv1d'):
        part = layer.get_submodule(name).requires_grad_(False)
        with torch.inference_mode():
            for key, p in list(part._parameters.items()):
                part._parameters[key] = None if p is None else nn.Parameter(p.clone(), requires_grad=False)
    return [g for g in grads_of(layer, use) if g is not None]


def changed_behind(use):
    """The output is changed in place, as a residual stream is."""
    layer, x = use.layer(), use.x().requires_grad_()
    o = layer(x)[0]
    o += x
    o.mul_(2)
    loss(o).backward()
    return [*grads(layer), x.grad]


WAYS = {
    'once': once, 'again': again, 'shared': shared, 'replicas': replicas,
    'hooks on parameters': hooks_on_parameters, 'hooks on modules': hooks_on_modules,
    'hooks on outputs': hooks_on_outputs, 'tied inside': tied_inside, 'tied between layers': tied_between,
    'parametrised': parametrised, 'pruned': pruned, 'plain tensors': plain_tensors, 'functional_call': functional,
    'transforms': transforms, 'deep copies': deep_copies, 'threads': threads,
    'checkpoints': functools.partial(checkpoints, use_reentrant=False),
    'reentrant checkpoints': functools.partial(checkpoints, use_reentrant=True),
    'checkpoints in checkpoints': checkpoints_in_checkpoints, 'offloaded': offloaded, 'retained': retained,
    'accumulated': accumulated, 'adapters': adapters, 'frozen': frozen, 'inference first': inferred_first,
    'weights of inference mode': with_weights_of_inference, 'changed behind': changed_behind,
}
OF_RANKS = {
    'DDP': distributed, 'FSDP 1': flat, 'FSDP 1, its parameters': functools.partial(flat, use_orig_params=True),
    'FSDP 1, each projection': functools.partial(flat, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    'FSDP 2': sharded,
}


@pytest.fixture(scope='module')
def group():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check(way, name, device):
    wanted = way(Use(Reference, device, **LAYERS[name]))
    assert len(wanted) > 2 and all(x is not None for x in wanted)
    for recompute in (True, False):
        found = way(Use(Longhorn, device, recompute=recompute, **LAYERS[name]))
        assert len(found) == len(wanted)
        errors = [relative_error(x, y) for x, y in zip(found, wanted, strict=True)]
        assert max(errors) < 1e-4, (recompute, errors)


@pytest.mark.parametrize('name', list(LAYERS))
@pytest.mark.parametrize('way', list(WAYS))
def test_gradients(way, name, device):
    check(WAYS[way], name, device)


@pytest.mark.parametrize('name', list(LAYERS))
@pytest.mark.parametrize('way', list(OF_RANKS))
def test_gradients_of_ranks(way, name, group, device):
    check(OF_RANKS[way], name, device)
