"""`python -m fla_longhorn_extras.onnx CHECKPOINT --output_dir DIR`."""

from __future__ import annotations

import argparse
import logging
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from fla_longhorn_extras.onnx.export import check_config, export_onnx


def main(args: list[str] | None = None) -> int:
    """Run with command-line options `args`; return 0, or 1 if onnxruntime computes something else than PyTorch."""
    parser = argparse.ArgumentParser(
        prog='python -m fla_longhorn_extras.onnx',
        description='Write a Longhorn language model as ONNX, in float32, and a program that generates from it without torch. '
        'Compare with PyTorch: greedy tokens, logits and speed.',
    )
    parser.add_argument('checkpoint', help='a folder, or a name on the hub')
    parser.add_argument('--output_dir', required=True, type=Path)
    parser.add_argument('--prompt_tokens', type=int, default=64, help='random ones, to compare with PyTorch')
    parser.add_argument('--new_tokens', type=int, default=200, help='greedy ones; 0 leaves the comparison out')
    options = parser.parse_args(args)
    if options.prompt_tokens < 1 or options.new_tokens < 0 or options.new_tokens == 1:
        parser.error('--prompt_tokens must be at least 1, and --new_tokens 0, or at least 2')

    # torch.onnx says that torchvision is missing, and warns of deprecations inside
    logging.getLogger('torch.onnx').setLevel(logging.ERROR)
    warnings.simplefilter('ignore')
    # refuse an option before the weights are read
    try:
        config = AutoConfig.from_pretrained(options.checkpoint)
    except (OSError, HFValidationError) as error:
        parser.error(f'{options.checkpoint} is neither a folder of a checkpoint nor on the hub: {str(error).splitlines()[0]}')
    check_config(config)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    files = export_onnx(model, options.output_dir)
    tokenizer = cached_file(options.checkpoint, 'tokenizer.json', _raise_exceptions_for_missing_entries=False)
    if tokenizer is not None:
        files.append(options.output_dir / 'tokenizer.json')
        # the files may be written into the checkpoint's own folder
        with suppress(shutil.SameFileError):
            shutil.copy(tokenizer, files[-1])
    for file in files:
        print(f'{file}  {file.stat().st_size / 1e6:.3g} MB')
    if not options.new_tokens:
        return 0
    from fla_longhorn_extras.onnx.compare import compare

    comparison = compare(model, options.output_dir, options.prompt_tokens, options.new_tokens)
    print(comparison)
    print(f'To generate: python {options.output_dir / "generate.py"} --help')
    return 0 if comparison.equal else 1


if __name__ == '__main__':
    raise SystemExit(main())
