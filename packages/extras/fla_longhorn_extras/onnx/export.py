"""From a model to a folder that needs neither torch nor this package."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fla_longhorn.models import LonghornForCausalLM
from fla_longhorn_extras.with_states import WithStates

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# both graphs, of a prompt and of a token, have these names
INPUTS = ('input_ids', 'recurrent_states', 'conv_states')
OUTPUTS = ('logits', 'next_recurrent_states', 'next_conv_states')
# rows and tokens of the trace, whose graph takes any number of both
TRACED = 3, 5


def export_onnx(model: LonghornForCausalLM, output_dir: str | os.PathLike) -> list[Path]:
    """Write a model as ONNX, and a program that generates from it.

    One graph is prefill and the decoding step: it reads any number of tokens from given states, and returns the logits after
    the last one and the states there (:class:`fla_longhorn_extras.with_states.WithStates`). onnxruntime runs one token as fast
    in it as in a graph of its own, and weights are stored and loaded once.

    Args:
        model (LonghornForCausalLM):
            The model, with float32 weights on the CPU.
        output_dir (str or os.PathLike):
            The folder, which is made if it is missing. Files of these names are replaced.

    Returns:
        list[Path]:
            `model.onnx`; `model.onnx.data` with the weights, of any size; `generate.py`; `generation_config.json`.

    Raises:
        ValueError: the model has attention layers, a gate or quantised weights, or is not float32 on the CPU.
        TypeError: it is of another class.
        ImportError: onnx or onnxscript is missing.
    """
    program = WithStates(model)
    check_config(model.config)
    check_weights(model)
    folder = Path(output_dir)
    graph = trace(program)
    folder.mkdir(parents=True, exist_ok=True)
    # all files or none: a model beside the weights of another one computes something
    with tempfile.TemporaryDirectory(dir=folder, prefix='.part-') as part:
        graph.save(Path(part, 'model.onnx'), external_data=True)
        shutil.copy(Path(__file__).with_name('generate.py'), part)
        model.generation_config.save_pretrained(part)
        files = [folder / name for name in ('model.onnx', 'model.onnx.data', 'generate.py', 'generation_config.json')]
        for file in files:
            os.replace(Path(part, file.name), file)
    return files


def check_config(config: PreTrainedConfig) -> None:
    """Raise for models that have no translation."""
    if config.model_type != 'longhorn':
        raise TypeError(f'the model must be a LonghornForCausalLM, got one of the type {config.model_type!r}')
    for name in ('attn', 'gate', 'quantization_config'):
        if getattr(config, name, None) is not None:
            raise ValueError(f'{name} must be None in the config of a model to translate to ONNX, got {getattr(config, name)}')


def check_weights(model: LonghornForCausalLM) -> None:
    for name, x in model.named_parameters():
        if x.dtype != torch.float32 or type(x.data) is not torch.Tensor:
            raise ValueError(
                f'model must have plain float32 weights, got {type(x.data).__name__} of {x.dtype} in {name}: load it with '
                'dtype=torch.float32 and without quantisation'
            )
        if x.device.type != 'cpu':
            raise ValueError(f"model must be on the CPU, got {name} on {x.device}: call model.to('cpu')")


def trace(program: WithStates) -> Any:
    """The `torch.onnx.ONNXProgram`."""
    try:
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass

        from fla_longhorn_extras.onnx.translate import OPSET, TRANSLATIONS
    except ImportError as error:
        raise ImportError(
            f"a model as ONNX needs more packages: pip install './packages/extras[onnx]' in a checkout ({error})"
        ) from error
    B, T = TRACED
    batch, length = torch.export.Dim('batch', min=1), torch.export.Dim('length')
    ids = torch.zeros(B, T, dtype=torch.int64, device='cpu')
    with torch.no_grad():
        graph: Any = torch.onnx.export(
            program, (ids, *program.new_states(B)), dynamo=True, verbose=False, opset_version=OPSET,
            dynamic_shapes=({0: batch, 1: length}, {1: batch}, {1: batch}), custom_translation_table=TRANSLATIONS,
            input_names=INPUTS, output_names=OUTPUTS,
        )
    # stack traces, with paths of this machine
    ClearMetadataAndDocStringPass()(graph.model)
    return graph
