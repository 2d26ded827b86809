"""fla's modules with a second forward, in plain PyTorch, that runs while `torch.compile` or `torch.export` traces.

fla dispatches its fused kernels behind `torch.compiler.disable`, which breaks a traced graph; the plain forward is what the
compiler fuses in their place. Each class has the parameters, names and numerics of the class of fla that it extends, and
outside a trace it is that class.
"""

from fla_longhorn.modules.convolution import ShortConvolution
from fla_longhorn.modules.mlp import GatedMLP
from fla_longhorn.modules.norm import L2Norm, RMSNorm

__all__ = ['GatedMLP', 'L2Norm', 'RMSNorm', 'ShortConvolution']
