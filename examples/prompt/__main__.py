"""Read a system prompt once, store its state in a file, and answer many questions from the file.

The models have random weights: times, sizes and bits are those of trained models of this shape, the answers say nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaModel, set_seed

from examples.mqar.report import describe_machine
from examples.prompt.config import RunArguments
from examples.prompt.states import load, save
from fla_longhorn import LonghornForCausalLM
from fla_longhorn.modules.cache import RewindableCache


def main(args: list[str] | None = None) -> int:
    """Run with command-line options `args`; return 0, 1 if an answer from the file has other bits, or 2 for a wrong option."""
    started = time.perf_counter()
    console = Console()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parser = HfArgumentParser(RunArguments, prog='python -m examples.prompt', description=__doc__)
    try:
        run, = parser.parse_args_into_dataclasses(args)
    except ValueError as error:
        parser.error(str(error))
    output = Path(run.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    device = run.torch_device

    set_seed(run.seed)
    LonghornForCausalLM(run.longhorn()).save_pretrained(output / 'checkpoint')
    # two instances, as in two processes; loaded both, for products have other bits where weights are aligned in another way
    reader, model = (AutoModelForCausalLM.from_pretrained(output / 'checkpoint').to(device).eval() for _ in range(2))
    prompt = torch.randint(run.vocab_size, (1, run.prompt_tokens), device=device)
    questions = torch.randint(run.vocab_size, (run.num_questions, run.question_tokens), device=device)
    path = output / 'prompt.safetensors'
    with torch.inference_mode():
        cache = reader(prompt, use_cache=True, logits_to_keep=1).past_key_values
    save(cache, path, reader)

    alone = questions.split(1)
    # whatever compiles does so here
    answer(model, prompt, alone[0], load(path, model), 2)
    without = [seconds(lambda x=x: answer(model, prompt, x, None, 1)) for x in alone]
    loading = [seconds(lambda: load(path, model)) for _ in alone]
    with_file = [seconds(lambda x=x: answer(model, prompt, x, load(path, model), 1)) for x in alone]

    different = [
        i for i, question in enumerate(alone)
        if not same(*(answer(x, prompt, question, states, run.answer_tokens) for x, states in (
            (reader, cache.snapshot()), (model, load(path, model)),
        )))
    ]
    both = cache.snapshot(), load(path, model)
    for states in both:
        states.batch_repeat_interleave(len(questions))
    together = [answer(x, prompt, questions, y, run.answer_tokens) for x, y in zip((reader, model), both, strict=True)]

    llama_bytes = transformer_cache_bytes(run, prompt)
    report = {
        'parameters': model.num_parameters(), 'different': different, 'batch_is_equal': same(*together),
        'seconds_to_first_token': {'without': without, 'with_file': with_file, 'of_it_loading': loading},
        'file_bytes': path.stat().st_size, 'transformer_cache_bytes': llama_bytes,
        'seconds': time.perf_counter() - started, **describe_machine(device), 'options': asdict(run),
    }
    (output / 'prompt.json').write_text(json.dumps(report, indent=2) + '\n')
    print_report(console, run, report)
    console.print(f'{report["seconds"]:.0f} s in all. See {output}/prompt.json, prompt.safetensors and checkpoint/.')
    if different or not report['batch_is_equal']:
        console.print(f'[red]From the file, answers {different} have other bits; in one batch: {not same(*together)}.[/]')
        return 1
    console.print(
        f'{run.num_questions} answers of {run.answer_tokens} tokens, alone and in one batch: all logits from the file are '
        'bit-equal to those of the model that did not stop.'
    )
    return 0


def answer(model: Any, prompt: torch.Tensor, questions: torch.Tensor, states: RewindableCache | None, tokens: int) -> Any:
    """Greedy answers; `states` are what the model has of the prompt, `None` to read it."""
    ids = torch.cat([prompt.expand(len(questions), -1), questions], dim=1)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=states, max_new_tokens=tokens, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def transformer_cache_bytes(run: RunArguments, prompt: torch.Tensor) -> int:
    """Keys and values that transformers' Llama keeps of the prompt, in float32."""
    llama = LlamaModel(run.llama()).to(prompt.device).eval()
    with torch.inference_mode():
        cache = llama(prompt, use_cache=True).past_key_values
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def print_report(console: Console, run: RunArguments, report: dict) -> None:
    times = {name: median(x) for name, x in report['seconds_to_first_token'].items()}
    file, llama = report['file_bytes'], report['transformer_cache_bytes']
    table = Table(title=f'{run.prompt_tokens:,} tokens of prompt, {report["parameters"]:,} parameters, {report["device"]}')
    table.add_column('')
    table.add_column('median', justify='right')
    table.add_row('first token, the prompt read again', f'{1e3 * times["without"]:.1f} ms')
    table.add_row('first token, from the file', f'{1e3 * times["with_file"]:.1f} ms')
    table.add_row('of it loading and checking the file', f'{1e3 * times["of_it_loading"]:.1f} ms')
    table.add_row('the file', f'{file / 1e6:.2f} MB')
    table.add_row('keys and values of a Llama of this width and depth', f'{llama / 1e6:.2f} MB')
    console.print(table)
    console.print(f'{times["without"] / times["with_file"]:.0f} times as fast; {llama / file:.0f} times smaller.')


if __name__ == '__main__':
    sys.exit(main())
