"""Train a byte-level Longhorn on the descriptions of all installed packages, save it with a model card, and let it write."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser, PrinterCallback, Trainer, default_data_collator, set_seed

from examples.mqar.report import describe_machine
from examples.mqar.train import Progress
from examples.text.card import model_card
from examples.text.config import RunArguments
from examples.text.data import END, EVAL_BLOCK, baselines, bits_per_byte, byte_tokenizer, count_files, read_texts, to_rows
from examples.text.write import load, write
from fla_longhorn import LonghornForCausalLM


def main(args: list[str] | None = None) -> int:
    """Run with command-line options `args`; return 0, 1 if the loss misses the target, or 2 for a wrong option."""
    started = time.perf_counter()
    console = Console(highlight=False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parser = HfArgumentParser(RunArguments, prog='python -m examples.text', description=__doc__)
    try:
        run, = parser.parse_args_into_dataclasses(args)
        output = writable(run.output_dir)
        texts = read_texts(run.files, run.held_out_every)
        rows, held_out = to_rows(texts.train, run.block_size), to_rows(texts.held_out, EVAL_BLOCK)
    except ValueError as error:
        parser.error(str(error))

    set_seed(run.seed)
    trainer = build_trainer(run, rows)
    model, tokenizer = trainer.model, byte_tokenizer()
    sizes = {'train_bytes': sum(map(len, texts.train)), 'held_out_bytes': sum(map(len, texts.held_out))}
    console.print(
        f'{model.num_parameters():,} parameters, {count_files(texts.train_files)} of {sizes["train_bytes"]:,} bytes, '
        f'{run.steps} steps of {run.batch_size} blocks of {run.block_size} bytes, on {model.device}'
    )
    clocks = time.perf_counter, time.process_time
    begun = [clock() for clock in clocks]
    trainer.train()
    training, processor = (clock() - start for clock, start in zip(clocks, begun, strict=True))

    model.eval()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    # what decoding compiles is compiled here, and no line about it stands in a sample
    model.generate(torch.full((1, 1), END, device=model.device), max_new_tokens=2, do_sample=False)
    samples = []
    for prompt in run.prompts:
        console.rule()
        samples.append({'prompt': prompt, 'text': write(model, tokenizer, prompt, *run.writing)})
    console.rule()

    reloaded, _ = load(output)
    bits = bits_per_byte(reloaded.to(model.device), held_out)
    lengths = sorted({EVAL_BLOCK, *(n for n in run.lengths if n <= held_out.numel())})
    by_length = {n: bits_per_byte(reloaded, to_rows(texts.held_out, n)) for n in lengths}
    command = shlex.join([python(), '-m', 'examples.text.write', str(output), run.prompts[0]])
    report = {
        'bits_per_byte': bits, 'bits_by_length': by_length,
        'baselines': baselines(rows, held_out, texts.held_out), 'parameters': model.num_parameters(),
        **sizes, 'read_bytes': run.steps * run.batch_size * run.block_size, 'removed_bytes': texts.removed_bytes,
        'seconds': {'training': training, 'processor': processor, 'total': time.perf_counter() - started},
        **describe_machine(model.device), 'options': asdict(run), 'samples': samples, 'command': command,
        'train_files': texts.train_files, 'held_out_files': texts.held_out_files, 'history': trainer.state.log_history,
    }
    (output / 'text.json').write_text(json.dumps(report, indent=2) + '\n', encoding='utf-8')
    model_card(report).save(output / 'README.md')
    print_bits(console, report)
    console.print(f'{report["seconds"]["total"]:.0f} s in all. See {output}/README.md and text.json. To let it write again:')
    print(command)
    if bits > run.target_bits:
        console.print(f'[red]{bits:.2f} bits per held-out byte miss the target of {run.target_bits:.2f}.[/]')
        return 1
    return 0


def writable(folder: str) -> Path:
    """Make the folder; `ValueError` if no file can be written there."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(f'output_dir must be a folder that can be written, got {folder}: {error}') from error
    return path


def python() -> str:
    """This interpreter, from here if it lies below."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def build_trainer(run: RunArguments, rows: torch.Tensor) -> Trainer:
    trainer = Trainer(
        model=LonghornForCausalLM(run.model()), args=run.training(), data_collator=default_data_collator,
        train_dataset=[{'input_ids': row, 'labels': row} for row in rows],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress)
    return trainer


def print_bits(console: Console, report: dict) -> None:
    table = Table(title=f'{report["held_out_bytes"]:,} held-out bytes of {count_files(report["held_out_files"])}')
    table.add_column('predicted')
    table.add_column('bits per byte', justify='right')
    table.add_column('perplexity', justify='right')
    for name, bits in report['baselines'].items():
        table.add_row(name, f'{bits:.2f}', f'{2 ** bits:.2f}')
    for length, bits in report['bits_by_length'].items():
        table.add_row(*(f'[bold]{x}[/]' for x in (
            f'by this model, {length:,} bytes at a time', f'{bits:.2f}', f'{2 ** bits:.2f}',
        )))
    console.print(table)


if __name__ == '__main__':
    sys.exit(main())
