"""The layer in plain PyTorch, and layers of either kind with the same weights."""

import torch
import torch.nn as nn

from fla_longhorn.layers import Longhorn
from fla_longhorn.ops import naive_recurrent_longhorn

LAYERS = {
    'paper': {},
    'exact': {'exact': True, 'num_heads': 2, 'use_bias': True},
    'scalar_beta': {'scalar_beta': True, 'num_heads': 2, 'exact': True, 'conv_bias': False},
    'gate per head': {'gate': 'head', 'num_heads': 2, 'exact': True, 'allow_neg_eigval': True},
    'gate per channel': {'gate': 'channel', 'value_proj': True, 'k_norm': 'l2', 'tie_qk': True},
}
WIDTH, T = 12, 19


class Reference(Longhorn):
    """The layer in PyTorch's operations alone, one token after the other."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        def heads(x):
            return x.unflatten(-1, (self.num_heads, -1))

        x, z = self.in_proj(hidden_states).chunk(2, -1)
        conv = self.conv1d
        x = nn.functional.conv1d(x.mT, conv.weight, conv.bias, padding=self.conv_size - 1, groups=x.shape[-1])
        x = nn.functional.silu(x[..., :hidden_states.shape[1]]).mT
        b, k, *q = self.x_proj(x).split(self.x_sizes, -1)
        q, k = heads(q[0] if q else k), heads(k)
        if not isinstance(self.k_norm, nn.Identity):
            k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        beta = self.beta_proj(b).sigmoid()
        o, _ = naive_recurrent_longhorn(
            q=q,
            k=k,
            v=heads(x if self.v_proj is None else self.v_proj(x)),
            beta=beta if self.scalar_beta else heads(beta),
            exact=self.exact,
            D=self.D.view(self.num_heads, -1),
            z=heads(z),
            allow_neg_eigval=self.allow_neg_eigval,
            g=None if self.gate is None else self.gate(x),
        )
        return (self.out_proj(o.flatten(2)),)


class Use:
    """A layer of a class and its options, in a dtype; layers made later have other weights, the same for each class."""

    def __init__(self, cls, device, **options):
        self.cls, self.options = cls, options
        self.to = {'device': device, 'dtype': torch.float64 if cls is Reference else torch.float32}
        self.made = 0

    def layer(self) -> Longhorn:
        torch.manual_seed(self.made)
        self.made += 1
        layer = Longhorn(hidden_size=WIDTH, state_size=3, **self.options)
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(torch.randn_like(p), alpha=0.2)
        layer.__class__ = self.cls
        return layer.to(**self.to)

    def x(self, seed: int = 0) -> torch.Tensor:
        return torch.randn(2, T, WIDTH, generator=torch.Generator().manual_seed(seed)).to(**self.to)


def replicate(module: nn.Module) -> nn.Module:
    """As `nn.DataParallel` makes them: a replica's weights are plain tensors."""
    replica = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, made in replica.items():
        for name, child in part._modules.items():
            made._modules[name] = None if child is None else replica[child]
        for name, p in part._parameters.items():
            if p is None:
                made._parameters[name] = None
            else:
                setattr(made, name, p * 1)
    return replica[module]
