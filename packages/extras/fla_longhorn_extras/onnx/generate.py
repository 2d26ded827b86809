"""Generate from the model.onnx beside this program, with numpy and onnxruntime. Text in and out also needs tokenizers.

    python generate.py --ids 11 42 7 --max_new_tokens 100
    python generate.py --prompt 'Once upon a time' --max_new_tokens 100 --temperature 0.8
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime


class Model:
    """The model of a folder, on the CPU.

    Args:
        folder (str or Path):
            With `model.onnx` and `model.onnx.data`.
        threads (int, Optional):
            Of onnxruntime. Default: `None`, its own choice.
    """

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        options = onnxruntime.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(Path(folder, 'model.onnx'), options, providers=['CPUExecutionProvider'])
        self.inputs = {x.name: x.shape for x in self.session.get_inputs()}
        self.vocab_size: int = self.session.get_outputs()[0].shape[-1]

    def new_states(self, batch_size: int) -> list[np.ndarray]:
        """The states before the first token: float32 `[layers, batch_size, ...]`, of the recurrence and of the convolution."""
        _, *shapes = self.inputs.values()
        # the batch has a name in place of a size
        return [np.zeros([batch_size if isinstance(n, str) else n for n in shape], np.float32) for shape in shapes]

    def __call__(self, ids: np.ndarray, states: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Read tokens `[batch_size, T]` that continue `states`, which stay as they are.

        Returns:
            Logits `[batch_size, vocab_size]` after the last token, and the states there. Rows of states, dimension 1, may be
            stored, selected, repeated and concatenated.

        Raises:
            ValueError: there is no token, one is outside the vocabulary, or states are of another model or batch.
        """
        ids = np.asarray(ids)
        if ids.ndim != 2 or not ids.size or ids.dtype.kind not in 'iu':
            raise ValueError(f'ids must be integers [batch_size, T], at least one a row, got {ids.dtype} {list(ids.shape)}')
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f'ids must be in 0 ... {self.vocab_size - 1}, got {ids.min()} ... {ids.max()}')
        wanted = [x.shape for x in self.new_states(len(ids))]
        if [x.shape for x in states] != wanted:
            raise ValueError(f'states must have the shapes {wanted}, got {[x.shape for x in states]}')
        logits, *states = self.session.run(None, dict(zip(self.inputs, (ids.astype(np.int64), *states), strict=True)))
        return logits, states


def generate(
    model: Model, prompts: Iterable[Sequence[int]], max_new_tokens: int, end: Iterable[int] = (), temperature: float = 0,
    seed: int | None = None,
) -> list[list[int]]:
    """Continue each prompt, of any length, by at most `max_new_tokens` tokens, or to the first that is in `end`.

    Prompts are read one by one, so there is no padding, and continued together. Temperature 0 takes the most likely token.
    """
    if max_new_tokens < 1:
        raise ValueError(f'max_new_tokens must be at least 1, got {max_new_tokens}')
    read = [model(np.array([prompt], np.int64), model.new_states(1)) for prompt in prompts]
    if not read:
        return []
    logits = np.concatenate([logits for logits, _ in read])
    states = [np.concatenate(rows, 1) for rows in zip(*(states for _, states in read), strict=True)]
    random, end = np.random.default_rng(seed), set(end)
    tokens: list[list[int]] = [[] for _ in read]
    while True:
        # the largest of scores with Gumbel noise is a sample
        scores = logits + temperature * random.gumbel(size=logits.shape) if temperature else logits
        chosen = scores.argmax(-1)
        for row, token in zip(tokens, chosen, strict=True):
            if not end.intersection(row[-1:]):
                row.append(int(token))
        if max(map(len, tokens)) == max_new_tokens or all(end.intersection(row[-1:]) for row in tokens):
            return tokens
        logits, states = model(chosen[:, None], states)


def main(args: list[str] | None = None) -> int:
    """Print what continues each prompt, one per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--prompt', action='append', help='text, for a folder with tokenizer.json; more than one is a batch')
    parser.add_argument('--ids', nargs='+', type=int, action='append', help='tokens; more than one --ids is a batch')
    parser.add_argument('--max_new_tokens', type=int, default=100)
    parser.add_argument('--temperature', type=float, default=0, help='0 takes the most likely token')
    parser.add_argument('--seed', type=int)
    parser.add_argument('--threads', type=int)
    parser.add_argument('--folder', type=Path, default=Path(__file__).parent)
    options = parser.parse_args(args)
    if bool(options.prompt) == bool(options.ids):
        parser.error('give --prompt or --ids')
    tokenizer = None
    if options.prompt:
        if not (options.folder / 'tokenizer.json').exists():
            parser.error(f'--prompt needs {options.folder / "tokenizer.json"}; give --ids')
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(options.folder / 'tokenizer.json'))
    end = json.loads((options.folder / 'generation_config.json').read_text(encoding='utf-8')).get('eos_token_id')
    prompts = options.ids if tokenizer is None else [tokenizer.encode(text).ids for text in options.prompt]
    model = Model(options.folder, options.threads)
    for tokens in generate(
        model, prompts, options.max_new_tokens, [] if end is None else end if isinstance(end, list) else [end],
        options.temperature, options.seed,
    ):
        print(' '.join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens))
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
