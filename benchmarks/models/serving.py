"""Tokens per second of vLLM and transformers' `generate` on a CPU, in one run.

    .venv-serving/bin/python -m benchmarks serving [--json FILE] [--requests 1 8 32] [--repeats 3]

`make test-serving` makes that environment. Both get the same float32 model, prompts of one length and as many new tokens for
each: all at once in vLLM, which has a slot for each, and as one batch in `generate`. They take turns; figures are medians of
the repeats. If the tokens differ, no figure is given.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report

SIZE = {'hidden_size': 256, 'num_hidden_layers': 4, 'vocab_size': 4096, 'bos_token_id': None, 'eos_token_id': None}
# as many parameters as Longhorn of the same width
MAMBA2 = {'num_heads': 8, 'head_dim': 64, 'state_size': 64, 'n_groups': 1, 'tie_word_embeddings': True}
PROMPT, NEW = 64, 64
# one process, as for `generate`; vLLM reads these variables when it is imported
ONE_PROCESS = {
    'VLLM_ENABLE_V1_MULTIPROCESSING': '0', 'VLLM_CPU_KVCACHE_SPACE': '1', 'VLLM_LOGGING_LEVEL': 'WARNING',
    'VLLM_NO_USAGE_STATS': '1',
}


def make(folder: str, model_type: str = 'longhorn'):
    """A model, `longhorn` or `mamba2`, whose greedy tokens vary, saved in `folder`."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from fla_longhorn import LonghornConfig, LonghornForCausalLM

    torch.manual_seed(0)
    if model_type == 'mamba2':
        model = Mamba2ForCausalLM(Mamba2Config(**SIZE, **MAMBA2)).eval()
    else:
        model = LonghornForCausalLM(LonghornConfig(**SIZE)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith('_proj.weight'):
                value.mul_(4)
    model.save_pretrained(folder)
    return model


def engine(folder: str, places: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """vLLM, for `places` requests at a time; `.llm` is its engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, skip_tokenizer_init=True, dtype='float32', max_model_len=PROMPT + NEW, max_num_seqs=places,
              enforce_eager=True, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def run(ids: torch.Tensor) -> torch.Tensor:
        outputs = llm.generate([{'prompt_token_ids': x} for x in ids.tolist()], sampling, use_tqdm=False)
        return torch.tensor([list(x.outputs[0].token_ids) for x in outputs])

    run.llm = llm
    return run


def measure(systems: dict[str, Callable], ids: torch.Tensor, repeats: int) -> dict:
    """Tokens per second of each.

    Raises:
        ValueError: their tokens differ.
    """
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(repeats + 1):
        tokens = {}
        for name, run in systems.items():
            start = time.perf_counter()
            tokens[name] = run(ids)
            # the first turn compiles
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
        first, *others = tokens.values()
        if not all(torch.equal(first, other) for other in others):
            raise ValueError(f'all systems must give the same tokens, got others for {len(ids)} requests')
    return {name: ids.shape[0] * NEW / median(times) for name, times in seconds.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks serving', description=__doc__.partition('\n')[0])
    parser.add_argument('--json', type=Path, help='file for the results')
    parser.add_argument('--requests', type=int, nargs='+', default=[1, 8, 32], help='at a time')
    parser.add_argument('--repeats', type=int, default=3)
    options = parser.parse_args(arguments)
    os.environ.update(ONE_PROCESS)
    with TemporaryDirectory() as folder:
        model = make(folder)
        # before Numba is imported, at which vLLM 0.32 fails
        serve = engine(folder, max(options.requests))

        def generate(ids: torch.Tensor) -> torch.Tensor:
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
            return out[:, ids.shape[1]:]

        rows = []
        for requests in options.requests:
            ids = torch.randint(SIZE['vocab_size'], (requests, PROMPT), generator=torch.Generator().manual_seed(1))
            rates = measure({'vllm': serve, 'generate': generate}, ids, options.repeats)
            rows.append({'requests': requests, 'tokens_per_s': rates})
            print(requests, 'requests:', *(f'{name} {rate:.0f} tokens/s' for name, rate in rates.items()), flush=True)
        # at the end, so that the load shows what else ran
        machine = describe_machine('cpu')
    result = {'machine': machine, 'model': SIZE, 'prompt': PROMPT, 'new_tokens': NEW, 'repeats': options.repeats, 'rows': rows}
    if options.json:
        write_report(result, options.json)
    return 0
