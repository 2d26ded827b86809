"""Train Longhorn on multi-query associative recall, measure its recall, reload it and ask it some questions."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
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

    set_seed(run.seed)
    trainer = build_trainer(LonghornForCausalLM(model_args.config(task)), task, run)
    device = trainer.args.device
    console.print(
        f'{trainer.model.num_parameters():,} parameters, up to {task.num_pairs} pairs of {task.num_keys} keys in '
        f'{task.seq_len} tokens, at most {run.steps} steps of {run.batch_size} sequences, on {device}'
    )
    train(trainer, run)
    trained = time.perf_counter()

    trainer.model.save_pretrained(output / 'checkpoint')
    model = AutoModelForCausalLM.from_pretrained(output / 'checkpoint').to(device).eval()
    recall = measure_recall(model, HeldOut(task, run.test_size, (run.seed, 1)), run.batch_size)
    by_pairs = recall_by_pairs(model, task, run.test_size_per_count, run.seed, run.batch_size)
    answers = ask(model, task, run.num_questions, run.seed)
    print_answers(console, task, answers)

    report = {
        'recall': recall,
        'recall_by_pairs': by_pairs,
        'steps': trainer.state.global_step,
        'parameters': model.num_parameters(),
        'seconds': {'training': trained - started, 'total': time.perf_counter() - started},
        **describe_machine(device),
        'options': asdict(task) | asdict(model_args) | asdict(run),
        'answers': describe_answers(answers),
        'history': trainer.state.log_history,
    }
    (output / 'mqar.json').write_text(json.dumps(report, indent=2) + '\n')
    draw_figure(report, output / 'mqar.png')
    console.print(
        f'Recall on {run.test_size:,} unseen sequences: [bold]{recall:.2%}[/] after {trainer.state.global_step} steps, '
        f'{report["seconds"]["total"]:.0f} s in all. See {output}/mqar.png, mqar.json and checkpoint/.'
    )
    if recall < run.target_recall:
        console.print(f'[red]The recall of {recall:.2%} misses the target of {run.target_recall:.0%}.[/]')
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
