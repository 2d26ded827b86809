"""Mutations of models as ONNX; they are listed and run where onnxruntime is installed: `PYTHONPATH=build/onnx`."""

from tests.mutate.mutation import Mutation

OPERATOR, MODEL, COMMAND = (f'packages/extras/tests/onnx/test_{name}.py::' for name in ('operator', 'model', 'command'))
STATES = 'packages/extras/fla_longhorn_extras/with_states.py'
TRANSLATE = 'packages/extras/fla_longhorn_extras/onnx/translate.py'

MUTATIONS = [
    Mutation(
        'memory-forgotten', STATES, 'recurrent_states[i].clone()', 'torch.zeros_like(recurrent_states[i])',
        'each call starts from an empty memory', f'{MODEL}test_pieces {MODEL}test_same_greedy_tokens', 'paper',
    ),
    Mutation(
        'convolution-forgotten', STATES, 'conv_states[i].clone()', 'torch.zeros_like(conv_states[i])',
        'each call convolves as if it were the first', f'{MODEL}test_pieces {MODEL}test_same_greedy_tokens', 'paper',
    ),
    Mutation(
        'states-of-one-layer', STATES, 'recurrent_states[i]', 'recurrent_states[0]',
        'all layers continue the first one', f'{MODEL}test_pieces {MODEL}test_same_greedy_tokens', 'paper',
    ),
    Mutation(
        'states-overwritten', STATES, 'conv_states[i].clone()', 'conv_states[i]',
        'a step changes the states that it is given',
        'packages/extras/tests/test_with_states.py::test_one_token_at_a_time_is_one_call',
    ),
    Mutation(
        'always-diagonal', TRANSLATE, 'exact_update if exact else diagonal', 'diagonal',
        'the exact update is the diagonal one', OPERATOR + 'test_equals_the_naive_one', 'exact state',
    ),
    Mutation(
        'steps-halved', TRANSLATE, '2.0 if allow_neg_eigval else 1.0', '1.0',
        'steps are never twice as long', OPERATOR + 'test_equals_the_naive_one', 'negative',
    ),
    Mutation(
        'zero-that-looks-valid', TRANSLATE, 'op.Mul(op.Mul(norm, 4.0), 0.0)', '0.0',
        'keys whose square overflows write nothing instead of NaN', OPERATOR + 'test_keys_that_overflow_give_nan',
    ),
    Mutation(
        'state-not-transposed', TRANSLATE, 'initial_state = op.Transpose(initial_state, perm=[0, 1, 3, 2])',
        'initial_state = op.Reshape(initial_state, [-1, k.shape[2], k.shape[3], v.shape[3]])',
        'a state with values first is read as one with keys first', OPERATOR + 'test_equals_the_naive_one', 'values',
    ),
    Mutation(
        'scale-dropped', TRANSLATE, 'perm=[1, 0, 2, 3]), scale)', 'perm=[1, 0, 2, 3]), 1.0)',
        'outputs are not scaled', OPERATOR + 'test_equals_the_naive_one', 'values',
    ),
    Mutation(
        'gate-let-through', 'packages/extras/fla_longhorn_extras/onnx/export.py', "('attn', 'gate', 'quantization_config')",
        "('attn', 'quantization_config')",
        'a gated model fails inside torch.onnx, after its weights are read',
        COMMAND + 'test_checkpoints_that_have_no_translation', 'gate',
    ),
    Mutation(
        'paths-left', 'packages/extras/fla_longhorn_extras/onnx/export.py',
        '    ClearMetadataAndDocStringPass()(graph.model)\n', '',
        'the file holds stack traces of this machine', COMMAND + 'test_the_files',
    ),
    Mutation(
        'end-ignored', 'packages/extras/fla_longhorn_extras/onnx/generate.py', 'if not end.intersection(row[-1:]):',
        'if True:',
        'rows go on after the end of the text', COMMAND + 'test_end_and_samples',
    ),
    Mutation(
        'negative-tokens', 'packages/extras/fla_longhorn_extras/onnx/generate.py', 'ids.min() < 0 or ', '',
        "negative tokens count from the vocabulary's end", COMMAND + 'test_bad_calls_of_the_program',
    ),
]
