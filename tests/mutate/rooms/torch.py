"""Mutations of the PyTorch backend."""

from tests.mutate.mutation import Mutation

FLAGS = 'tests/ops/test_longhorn.py::test_flags'
PACKED = 'tests/ops/test_longhorn.py::test_packed'

MUTATIONS = [
    Mutation(
        'decay-sign', 'ops/torch/diagonal.py', 'a = 1 - k.square()', 'a = 1 + k.square()', 'the memory grows',
        FLAGS, 'torch diagonal chunk',
    ),
    Mutation(
        'decay-of-another-token', 'ops/torch/diagonal.py', 'addcmul_(a[t], states[t])', 'addcmul_(a[t - 1], states[t])',
        "the state decays by the wrong token's step", FLAGS, 'torch diagonal chunk',
    ),
    Mutation(
        'strip-end-gradient', 'ops/torch/diagonal.py', 'dS[-1] += G', 'pass',
        'no gradient crosses a strip or comes from the final '
        'state', FLAGS, 'torch diagonal chunk',
    ),
    Mutation(
        'backward-decay', 'ops/torch/diagonal.py', 'addcmul_(a[t + 1], dS[t + 1])', 'addcmul_(a[t], dS[t + 1])',
        "the state's gradient decays by the wrong token's step", FLAGS, 'torch diagonal chunk',
    ),
    Mutation(
        'residual-term', 'ops/torch/diagonal.py', 'r.addcmul_(k[..., None], S[:-1], value=-1)', 'r',
        "dk lacks the gradient through the memory's answer", FLAGS, 'torch diagonal chunk',
    ),
    Mutation(
        'substitution-stops-early', 'ops/torch/exact.py', 'for s in range(len(k) - 1, 0, -1):',
        'for s in range(len(k) - 2, 0, -1):',
        "the last token's residual has no gradient to those before", FLAGS, 'torch exact chunk',
    ),
    Mutation(
        'gram-diagonal', 'ops/torch/exact.py', '-(W @ U_b.mT).tril(-1)', '-(W @ U_b.mT).tril()',
        'a key gets a gradient from its own residual', FLAGS, 'torch exact chunk',
    ),
    Mutation(
        'attends-before-itself', 'ops/torch/exact.py', '(Q @ K.mT).tril() @ head_first(U)',
        '(Q @ K.mT).tril(-1) @ head_first(U)',
        'an output does not see its own token', FLAGS, 'torch exact chunk',
    ),
    Mutation(
        'exact-state-gradient', 'ops/torch/exact.py', 'dS + Q.mT @ dY - K.mT @ W', 'dS + Q.mT @ dY',
        "the state's gradient does not see what was learnt", FLAGS, 'torch exact chunk',
    ),
    Mutation(
        'skip-forgotten-in-dv', 'ops/torch/__init__.py', 'dv += D.float() * dy', 'pass', 'dv lacks the skip connection', FLAGS,
        'torch diagonal chunk D',
    ),
    Mutation(
        'skip-forgotten-in-dz', 'ops/torch/__init__.py', 'y += D.float() * v', 'pass', 'dz lacks the skip connection', FLAGS,
        'torch diagonal chunk D-z',
    ),
    Mutation(
        'gate-forgotten-in-dD', 'ops/torch/__init__.py', 'dD = (dy * v)', 'dD = (do * v)', 'dD lacks the gate', FLAGS,
        'torch diagonal chunk D-z',
    ),
    Mutation(
        'norm-gradient-halved', 'ops/torch/__init__.py', 'dk -= 2 * k *', 'dk -= k *',
        "dk has half of the step size's part", FLAGS, 'torch diagonal chunk',
    ),
    Mutation(
        'logit-gradient', 'ops/torch/__init__.py', 'chain * b * (-beta).sigmoid() if', 'chain * b if',
        "the sigmoid's slope is incomplete", FLAGS, 'torch diagonal chunk sigmoid',
    ),
    Mutation(
        'scale-forgotten-in-dz', 'ops/torch/__init__.py', 'y *= scale', 'pass', 'dz lacks the scale', FLAGS,
        'torch diagonal chunk scale0.25',
    ),
    Mutation(
        'strip-past-its-sequence', 'ops/torch/__init__.py', 'slice(t, min(t + STRIP, eos, t_c + C))',
        'slice(t, min(t + STRIP, t_c + C))',
        "backward's last strip runs into the next packed sequence", PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'forward-past-its-sequence', 'ops/torch/__init__.py', 'slice(t, min(t + STRIP, eos)), rows',
        'slice(t, t + STRIP), rows',
        "forward's last strip runs into the next packed sequence", PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'slot-of-the-row', 'ops/torch/__init__.py', 'states[slots + (t_c - bos) // C]', 'states[slots + t_c // C]',
        "backward restarts from another sequence's state", PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'saved-at-the-wrong-tokens', 'ops/torch/__init__.py', 'if save_states and (t - bos) % C == 0:',
        'if save_states and t % C == 0:',
        "states are saved where the row's intervals start, not the sequence's", PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'state-gradient-layout', 'ops/torch/__init__.py', 'dh = dh.transpose(-1, -2).contiguous()', 'pass',
        "the initial state's gradient has the other layout", FLAGS, 'torch diagonal chunk initial_state-state_v_first',
    ),
    Mutation(
        'low-precision-sums', 'ops/torch/__init__.py', 'x.detach().float().transpose(0, 1)', 'x.detach().transpose(0, 1)',
        'sums are in the dtype of the inputs', 'tests/ops/test_longhorn.py::test_low_precision', 'torch diagonal chunk',
    ),
    Mutation(
        'head-steps-unsummed', 'ops/torch/__init__.py', 'dbeta = dbeta.sum(-1)', 'dbeta = dbeta[..., 0]',
        "a head's dbeta is that of one channel", FLAGS, 'torch diagonal chunk scalar_beta',
    ),
]
