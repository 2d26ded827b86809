"""Mutations of the PyTorch backend."""

from tests.mutate.mutation import Mutation

FLAGS = 'tests/ops/test_longhorn.py::test_flags'
PACKED = 'tests/ops/test_longhorn.py::test_packed'

MUTATIONS = [
    Mutation(
        'strip-end-gradient', 'ops/torch.py', 'args, do[t, rows], G)',
        'args, do[t, rows], torch.zeros_like(G))',
        'no gradient crosses a strip or comes from the final '
        'state', FLAGS, 'torch diagonal chunk',
    ),
    Mutation(
        'strip-past-its-sequence', 'ops/torch.py', 'slice(t, min(t + STRIP, eos, t_c + C))',
        'slice(t, min(t + STRIP, t_c + C))',
        "backward's last strip runs into the next packed sequence", PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'low-precision-sums', 'ops/torch.py', 'x.detach().float().transpose(0, 1)', 'x.detach().transpose(0, 1)',
        'sums are in the dtype of the inputs', 'tests/ops/test_longhorn.py::test_low_precision', 'torch diagonal chunk',
    ),
    Mutation(
        'doubled-norm-slope', 'ops/torch.py', '- c * (b * f).square()', '- (b * f).square()',
        'the gradient of a key takes a doubled step for a single one', FLAGS, 'torch exact chunk allow_neg_eigval',
    ),
    Mutation(
        'no-decay', 'ops/torch.py', 'P = S if decay is None else decay[t] * S', 'P = S',
        'the exact update ignores the gate', 'tests/ops/test_gate.py::test_outputs_and_gradients',
        'torch exact chunk channel',
    ),
]
