"""fla's modules with a second forward in PyTorch, which runs while `torch.compile` or `torch.export` traces.

fla calls its fused kernels behind `torch.compiler.disable`, which breaks a traced graph; the compiler fuses the second forward
instead. Each class has the parameters, names and numerics of the class of fla that it extends.
"""

from fla_longhorn.modules.convolution import ShortConvolution
from fla_longhorn.modules.mlp import GatedMLP
from fla_longhorn.modules.norm import L2Norm, RMSNorm

__all__ = ['GatedMLP', 'L2Norm', 'RMSNorm', 'ShortConvolution']
