"""Train Longhorn on multi-query associative recall, measure its recall, reload it and ask it some questions."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, HfArgumentParser, set_seed

from examples.mqar.config import ModelArguments, RunArguments
from examples.mqar.data import MQAR, HeldOut
from examples.mqar.evaluate import ask, measure_recall, recall_by_pairs
from examples.mqar.plot import draw_figure
from examples.mqar.report import describe_answers, describe_machine, print_answers
from examples.mqar.train import build_trainer, train
from fla_longhorn import LonghornForCausalLM


def main(args: list[str] | None = None) -> int:
    """Run with command-line options `args`; return 0, 1 if the target recall is missed, or 2 for a wrong option."""
    started = time.perf_counter()
    console = Console()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parser = HfArgumentParser((MQAR, ModelArguments, RunArguments), prog='python -m examples.mqar', description=__doc__)
    try:
        task, model_args, run = parser.parse_args_into_dataclasses(args)
    except ValueError as error:
        parser.error(str(error))
    output = Path(run.output_dir)
    output.mkdir(parents=True, exist_ok=True)

    console.print(
        f'Up to {task.num_pairs} pairs of {task.num_keys} keys in {task.seq_len} tokens, at most {run.steps} steps of '
        f'{run.batch_size} sequences'
    )
    model, figures = train_and_measure(console, model_args, task, run)
    recall = figures['recall']
    beside = None
    if run.both:
        other = replace(model_args, exact=not model_args.exact)
        _, beside = train_and_measure(console, other, task, replace(run, output_dir=str(output / other.form)))
    answers = ask(model, task, run.num_questions, run.seed)
    print_answers(console, task, answers)

    report = {
        **figures,
        'beside': beside,
        'seconds': {'training': figures['seconds'], 'total': time.perf_counter() - started},
        **describe_machine(model.device),
        'options': asdict(task) | asdict(model_args) | asdict(run),
        'answers': describe_answers(answers),
    }
    (output / 'mqar.json').write_text(json.dumps(report, indent=2) + '\n')
    draw_figure(report, output / 'mqar.png')
    console.print(
        f'Recall on {run.test_size:,} unseen sequences, {model_args.form} form: [bold]{recall:.2%}[/] after '
        f'{figures["steps"]} steps, {report["seconds"]["total"]:.0f} s in all. See {output}/mqar.png, mqar.json '
        'and checkpoint/.'
    )
    if recall < run.target_recall:
        console.print(f'[red]The recall of {recall:.2%} misses the target of {run.target_recall:.0%}.[/]')
        return 1
    return 0


def train_and_measure(
    console: Console, model_args: ModelArguments, task: MQAR, run: RunArguments,
) -> tuple[LonghornForCausalLM, dict]:
    """A trained model of one form, read from its checkpoint, and its figures."""
    started = time.perf_counter()
    set_seed(run.seed)
    trainer = build_trainer(LonghornForCausalLM(model_args.config(task)), task, run)
    device = trainer.args.device
    console.print(f'{model_args.form} form, {trainer.model.num_parameters():,} parameters, on {device}')
    train(trainer, run)
    seconds = time.perf_counter() - started

    folder = Path(run.output_dir, 'checkpoint')
    trainer.model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    return model, {
        'form': model_args.form,
        'recall': measure_recall(model, HeldOut(task, run.test_size, (run.seed, 1)), run.batch_size),
        'recall_by_pairs': recall_by_pairs(model, task, run.test_size_per_count, run.seed, run.batch_size),
        'steps': trainer.state.global_step,
        'parameters': model.num_parameters(),
        'seconds': seconds,
        'history': trainer.state.log_history,
    }


if __name__ == '__main__':
    sys.exit(main())
