"""Train Vision Longhorn and a ViT on 4,000 handwritten digits, reload Longhorn through transformers and classify with it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoImageProcessor, AutoModelForImageClassification, HfArgumentParser, pipeline

import fla_longhorn_extras.timm  # noqa: F401  registers the models with timm
from examples.mqar.report import describe_machine
from examples.vision.config import RunArguments
from examples.vision.data import load_digits
from examples.vision.plot import COLUMNS, ROWS, draw_figure
from examples.vision.train import train


def main(args: list[str] | None = None) -> int:
    """Run with command-line options `args`; return 0, 1 if the target accuracy is missed, or 2 for a wrong option."""
    started = time.perf_counter()
    console = Console()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parser = HfArgumentParser(RunArguments, prog='python -m examples.vision', description=__doc__)
    try:
        run, = parser.parse_args_into_dataclasses(args)
    except ValueError as error:
        parser.error(str(error))
    output = Path(run.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    training, held_out = load_digits(run.train_size)

    runs = []
    for name in run.models:
        for seed in range(run.seeds):
            begun = time.perf_counter()
            model, history = train(name, seed, run, training, held_out)
            runs.append({
                'model': name, 'seed': seed, 'parameters': model.num_parameters(), 'accuracy': history[-1],
                'seconds': time.perf_counter() - begun, 'history': history,
            })
            if len(runs) == 1:
                model.save_pretrained(output / 'checkpoint')

    answers = ask(output / 'checkpoint', held_out.images[:COLUMNS * ROWS], held_out.labels)
    report = {
        'runs': runs, 'answers': answers, 'held_out': len(held_out), 'seconds': time.perf_counter() - started,
        **describe_machine(model.device), 'options': asdict(run),
    }
    (output / 'vision.json').write_text(json.dumps(report, indent=2) + '\n')
    draw_figure(runs, held_out.images, answers, output / 'vision.png')
    print_runs(console, run, runs)
    reached = mean(x['accuracy'] for x in runs if x['model'] == run.models[0])
    console.print(f'{report["seconds"]:.0f} s in all. See {output}/vision.png, vision.json and checkpoint/.')
    if reached < run.target_accuracy:
        console.print(f'[red]{run.models[0]}: {reached:.2%} misses the target of {run.target_accuracy:.0%}.[/]')
        return 1
    return 0


def ask(checkpoint: Path, images: list, labels) -> list[dict]:
    """The reloaded checkpoint's answers, through transformers' image pipeline."""
    classify = pipeline(
        'image-classification', model=AutoModelForImageClassification.from_pretrained(checkpoint),
        image_processor=AutoImageProcessor.from_pretrained(checkpoint),
    )
    best = [classify(image, top_k=1)[0] for image in images]
    return [
        {'answer': x['label'].removeprefix('LABEL_'), 'truth': str(truth), 'probability': x['score']}
        for x, truth in zip(best, labels, strict=False)
    ]


def print_runs(console: Console, run: RunArguments, runs: list[dict]) -> None:
    table = Table(title=f'Accuracy on {5000 - run.train_size} held-out digits after {run.epochs} epochs')
    for column in ('model', 'parameters', 'accuracy by seed', 'mean', 'seconds a run'):
        table.add_column(column, justify='left' if column == 'model' else 'right')
    for name in run.models:
        rows = [x for x in runs if x['model'] == name]
        table.add_row(
            name, f'{rows[0]["parameters"]:,}', ' '.join(f'{x["accuracy"]:.2%}' for x in rows),
            f'{mean(x["accuracy"] for x in rows):.2%}', f'{mean(x["seconds"] for x in rows):.0f}',
        )
    console.print(table)


if __name__ == '__main__':
    sys.exit(main())
