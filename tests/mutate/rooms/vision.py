"""Mutations of Vision Longhorn; they are listed and run where timm is installed."""

from tests.mutate.mutation import Mutation

MIXER = 'packages/extras/tests/timm/test_mixer.py::'
PACKED = 'packages/extras/tests/timm/test_packed.py::'

MUTATIONS = [
    Mutation(
        'project-of-the-layer', 'layers/longhorn.py', 'self.k_norm(self.by_heads(k)),', 'self.k_norm(self.by_heads(-k)),',
        "the layer stores under other keys than timm's mixer", MIXER + 'test_layers',
    ),
    Mutation(
        'project-of-the-mixer', 'packages/extras/fla_longhorn_extras/timm/mixer.py', 'q, k, v, beta.squeeze(-1)',
        'q, -k, v, beta.squeeze(-1)', "timm's mixer stores under other keys than the layer", MIXER + 'test_layers',
    ),
    Mutation(
        'second-direction-forwards', 'packages/extras/fla_longhorn_extras/timm/mixer.py',
        'x = torch.cat([x, reverse(x, packing)], -1)',
        'x = torch.cat([x, x], -1)', 'both directions read the tokens in order', MIXER + 'test_equation',
    ),
    Mutation(
        'decays-of-the-first-direction', 'packages/extras/fla_longhorn_extras/timm/mixer.py', 'v.unbind(2), strict=True',
        '[v[:, :, 0]] * 2, strict=False',
        'the memory of the second direction fades by what the first one reads', MIXER + 'test_layers',
    ),
    Mutation(
        'convolution-over-images', 'packages/extras/fla_longhorn_extras/timm/mixer.py',
        'x, _ = self.conv1d(x, cu_seqlens=cu_seqlens)', 'x, _ = self.conv1d(x)',
        'the convolution of an image begins in the one before', PACKED + 'test_packed_is_separate',
    ),
    Mutation(
        'residual-narrow', 'packages/extras/fla_longhorn_extras/timm/model.py',
        'x = self.pos_drop(x + positions).float()', 'x = self.pos_drop(x + positions)',
        'the sum over the blocks is kept in 16 bits', 'packages/extras/tests/timm/test_precision.py::test_weights_in_bfloat16',
    ),
]
