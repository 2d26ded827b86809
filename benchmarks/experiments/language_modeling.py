"""Language modelling (the paper's Table 1 and Fig. 5): models side by side on one text, through transformers' Trainer.

    python -m benchmarks.language_modeling benchmarks/settings/lm_small.json [--output_dir outputs/lm_small]

A setting is a JSON file: `text` (:class:`benchmarks.experiments.text.TextArguments`), `block_size`, `models` (by name, the
keywords of `AutoConfig.for_model`, over those of `model` that all share), `training` (transformers' `TrainingArguments`) and,
optionally, `seeds`. Each model is trained in turn, its checkpoint kept in the output folder; a finished one is not trained
again, and an interrupted one goes on from its last checkpoint where `training` saves any. `results.json` holds held-out loss
and perplexity over training, and `results.png` draws them, seeds as a band around their mean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import datasets
import transformers
from matplotlib.figure import Figure
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import fla_longhorn  # noqa: F401  registers Longhorn with the Auto classes
from benchmarks.experiments.text import TextArguments, token_blocks, vocabulary_size
from benchmarks.measure.machine import describe_machine
from benchmarks.report.plots import label_ends, plot_band, shown, style, tidy


def checkpoint_folder(output: Path, name: str, seed: int) -> Path:
    return output / f'{name.replace(" ", "_")}-{seed}'


def train_model(setting: dict, name: str, seed: int, output: Path) -> dict:
    """Train one model of the setting; return its losses on held-out text."""
    started = time.perf_counter()
    text = TextArguments(**setting['text'])
    options = {'vocab_size': vocabulary_size(text)} | setting.get('model', {}) | setting['models'][name]
    folder = checkpoint_folder(output, name, seed)
    arguments = TrainingArguments(**{
        'output_dir': str(folder / 'trainer'), 'eval_strategy': 'steps', 'logging_strategy': 'steps', 'report_to': 'none',
        'save_strategy': 'no', **setting['training'], 'seed': seed,
    })
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    trainer = Trainer(
        model=model, args=arguments, data_collator=default_data_collator,
        train_dataset=token_blocks(text, setting['block_size'], held_out=False),
        eval_dataset=token_blocks(text, setting['block_size'], held_out=True),
    )
    trainer.remove_callback(PrinterCallback)
    has_checkpoint = (folder / 'trainer').is_dir() and get_last_checkpoint(str(folder / 'trainer'))
    trainer.train(resume_from_checkpoint=bool(has_checkpoint) or None)
    model.save_pretrained(folder / 'checkpoint')
    history = [(x['step'], x['eval_loss']) for x in trainer.state.log_history if 'eval_loss' in x]
    return {
        'model': name, 'seed': seed, 'options': options, 'parameters': model.num_parameters(), 'history': history,
        'loss': history[-1][1], 'perplexity': math.exp(history[-1][1]), 'seconds': time.perf_counter() - started,
    }


def draw(report: dict, path: Path | str) -> None:
    figure = Figure(figsize=(8.5, 4.4), dpi=140, layout='constrained')
    axis = figure.subplots()
    runs = {}
    for run in report['runs']:
        runs.setdefault(run['model'], []).append(run)
    losses = {name: sum(run['loss'] for run in some) / len(some) for name, some in runs.items()}
    names = shown(list(runs), losses)
    for name in names:
        curves = [run['history'] for run in runs[name]]
        plot_band(axis, [step for step, _ in curves[0]], [[loss for _, loss in x] for x in curves],
                  f'{losses[name]:.3f}  {name}', style(name, names))
    axis.set(title=report['setting']['title'], xlabel='step', ylabel='held-out loss (nats a token)')
    tidy(axis)
    label_ends(axis)
    figure.savefig(path)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.language_modeling', description=__doc__.splitlines()[0])
    parser.add_argument('setting', type=Path, help='JSON file with text, models and training')
    parser.add_argument('--output_dir', type=Path, help='where results go (default: outputs/<name of the setting>)')
    options = parser.parse_args(args)
    setting = json.loads(options.setting.read_text())
    output = options.output_dir or Path('outputs') / options.setting.stem
    output.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()

    results = output / 'results.json'
    runs = json.loads(results.read_text())['runs'] if results.exists() else []
    done = [(run['model'], run['seed']) for run in runs]
    for seed, name in itertools.product(setting.get('seeds', [0]), setting['models']):
        if (name, seed) in done:
            continue
        print(f'{name}, seed {seed}', flush=True)
        runs.append(train_model(setting, name, seed, output))
        report = {'setting': setting, 'machine': describe_machine(), 'runs': runs}
        results.write_text(json.dumps(report, indent=1) + '\n')
    for run in runs:
        print(f'{run["model"]:>20}, seed {run["seed"]}: {run["parameters"]:,} parameters, loss {run["loss"]:.4f}, '
              f'perplexity {run["perplexity"]:.3f}, {run["seconds"]:.0f} s')
    draw({'setting': setting, 'runs': runs}, output / 'results.png')
