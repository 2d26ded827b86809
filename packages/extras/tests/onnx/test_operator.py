"""The operator in onnxruntime, with each of its arguments: the naive one in float64."""

import inspect

import onnxruntime
import pytest
import torch
import torch.nn as nn

from fla_longhorn.ops import chunk_longhorn, naive_recurrent_longhorn
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.selfcheck.compare import relative_error
from fla_longhorn_extras.onnx.translate import OPSET, TRANSLATIONS, longhorn_fwd

BATCH, LENGTH = torch.export.Dim('batch', min=1), torch.export.Dim('length')
H, K, V = 2, 4, 6


class Call(nn.Module):
    """`chunk_longhorn` with tensors by name and options; only requested results."""

    def __init__(self, options: dict):
        super().__init__()
        self.options = options

    def forward(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(x for x in chunk_longhorn(**tensors, **self.options) if x is not None)


def make_inputs(
    B: int, T: int, names: list[str], per_head: bool = False, values_first: bool = False,
) -> dict[str, torch.Tensor]:
    tensors = {
        'q': torch.randn(B, T, H, K), 'k': torch.randn(B, T, H, K), 'v': torch.randn(B, T, H, V),
        'beta': torch.rand(B, T, H) if per_head else torch.rand(B, T, H, V), 'D': torch.randn(H, V),
        'z': torch.randn(B, T, H, V), 'initial_state': torch.randn(B, H, V, K) if values_first else torch.randn(B, H, K, V),
    }
    return {name: x for name, x in tensors.items() if name in ('q', 'k', 'v', 'beta', *names)}


def export(tensors: dict[str, torch.Tensor], options: dict, **shapes) -> torch.onnx.ONNXProgram:
    return torch.onnx.export(
        Call(options).eval(), kwargs={'tensors': tensors}, dynamo=True, opset_version=OPSET, verbose=False,
        custom_translation_table=TRANSLATIONS, input_names=list(tensors), **shapes,
    )


def load(tensors: dict[str, torch.Tensor], options: dict) -> onnxruntime.InferenceSession:
    """For any number of rows and tokens."""
    dims = {'initial_state': {0: BATCH}, 'D': {}}
    shapes = {name: dims.get(name, {0: BATCH, 1: LENGTH}) for name in tensors}
    with torch.no_grad():
        program = export(tensors, options, dynamic_shapes={'tensors': shapes})
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=['CPUExecutionProvider'])


CASES = {
    'least': ([], {}),
    'state': (['initial_state'], {'output_final_state': True}),
    'from zero': ([], {'output_final_state': True}),
    'output alone': (['initial_state'], {}),
    'layer': (['initial_state', 'D', 'z'], {'output_final_state': True, 'use_beta_sigmoid_in_kernel': True}),
    'per head': (['D'], {'output_final_state': True, 'per_head': True}),
    'per head, sigmoid': (['z'], {'per_head': True, 'use_beta_sigmoid_in_kernel': True}),
    'negative': (['initial_state', 'z'], {'allow_neg_eigval': True, 'output_final_state': True}),
    'scale, values first': (['initial_state', 'D', 'z'], {'scale': 0.3, 'state_v_first': True, 'output_final_state': True}),
}


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
@pytest.mark.parametrize('name', CASES)
def test_equals_the_naive_one(name, exact):
    names, options = CASES[name]
    options = {**options, 'exact': exact}
    shapes = options.pop('per_head', False), options.get('state_v_first', False)
    session = load(make_inputs(3, 5, names, *shapes), options)
    for B, T in ((3, 5), (1, 1), (4, 1), (1, 70), (2, 2)):
        tensors = make_inputs(B, T, names, *shapes)
        got = session.run(None, {name: x.numpy() for name, x in tensors.items()})
        expected = naive_recurrent_longhorn(**{name: x.double() for name, x in tensors.items()}, **options)
        expected = [x for x in expected if x is not None]
        assert len(got) == len(expected) == 1 + options.get('output_final_state', False)
        for own, x in zip(got, expected, strict=True):
            assert own.shape == x.shape
            assert relative_error(torch.from_numpy(own), x) < 1e-6


def test_keys_that_overflow_give_nan():
    tensors = make_inputs(1, 3, [])
    session = load(tensors, {})
    tensors['k'] = torch.full_like(tensors['k'], 1e19)
    o, = session.run(None, {name: x.numpy() for name, x in tensors.items()})
    expected, _ = naive_recurrent_longhorn(**tensors)
    assert torch.equal(torch.from_numpy(o).isnan(), expected.isnan()) and expected.isnan().all()


def test_signature_is_the_operators():
    assert tuple(inspect.signature(longhorn_fwd).parameters) == (*Arguments._fields, 'save_states', 'parallel')


@pytest.mark.parametrize(('error', 'change'), [
    ('g must be None', {'g': torch.zeros(3, 5, H)}),
    ('cu_seqlens must be None', {'cu_seqlens': torch.tensor([0, 2, 5])}),
    ('v must be float32 to be translated to ONNX, got FLOAT16', {'v': torch.ones(1, 5, H, V, dtype=torch.float16)}),
])
def test_what_has_no_translation(error, change):
    B = 3 if 'g' in change else 1
    tensors = {**make_inputs(B, 5, []), **change}
    with torch.no_grad(), pytest.raises(torch.onnx.OnnxExporterError, match=error):
        export(tensors, {})


def test_states_for_backward_have_no_translation():
    tensors = {name: x.requires_grad_() for name, x in make_inputs(1, 5, []).items()}
    with pytest.raises(torch.onnx.OnnxExporterError, match='export under torch.no_grad'):
        export(tensors, {})
