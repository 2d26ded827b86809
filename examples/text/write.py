"""Write text with a model that `python -m examples.text` has trained, byte by byte as it comes.

    python -m examples.text.write outputs/text 'The library '
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

import fla_longhorn  # noqa: F401  registers Longhorn with the Auto classes
from examples.text.data import END


def write(model, tokenizer, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """Print `prompt` and what the model writes after it, word by word; return both. An empty prompt begins a new text."""
    ids = torch.tensor([list(os.fsencode(prompt)) or [END]], device=model.device)
    set_seed(seed)
    sampling = {'do_sample': True, 'temperature': temperature} if temperature else {'do_sample': False}
    # the streamer holds bytes back until they are a whole character
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, streamer=streamer, **sampling,
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)


def load(folder: Path):
    """The model and the tokenizer in `folder`; `ValueError` if it is not one of `python -m examples.text`."""
    if missing := [name for name in ('config.json', 'model.safetensors', 'tokenizer.json') if not (folder / name).is_file()]:
        raise ValueError(f'{folder} has no {missing[0]}: it is not a model of `python -m examples.text`')
    config = AutoConfig.from_pretrained(folder)
    if config.model_type != 'longhorn' or config.vocab_size != END + 1:
        raise ValueError(
            f'{folder} holds a {config.model_type} of {config.vocab_size} tokens, not a longhorn of {END + 1}: it is not a '
            'model of `python -m examples.text`'
        )
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m examples.text.write', description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=Path, help='output folder of `python -m examples.text`')
    parser.add_argument('prompt', nargs='?', default='', help='text to go on from; a new text begins without one')
    parser.add_argument('--max_new_tokens', type=int, default=400, help='most bytes to write (default: 400)')
    parser.add_argument('--temperature', type=float, default=0.6, help='0 takes the likeliest byte (default: 0.6)')
    parser.add_argument('--seed', type=int, default=0, help='of the sampling (default: 0)')
    options = parser.parse_args(args)
    if options.max_new_tokens < 1 or options.temperature < 0:
        parser.error('max_new_tokens must be at least 1 and temperature at least 0')
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, tokenizer = load(options.folder)
    except ValueError as error:
        parser.error(str(error))
    write(model, tokenizer, options.prompt, options.max_new_tokens, options.temperature, options.seed)
    return 0


if __name__ == '__main__':
    sys.exit(main())
