"""Language modelling (the paper's Table 1 and Fig. 5): models side by side on one text, through transformers' Trainer.

    python -m experiments language_modeling experiments/settings/lm_small.json [--output_dir outputs/lm_small]
    torchrun --nproc-per-node 8 -m experiments language_modeling experiments/settings/lm_350M.json --models 'Longhorn, exact'

A setting is a JSON file: `text` (:class:`experiments.text.TextArguments`), `block_size`, `models` (by name, the keywords of
`AutoConfig.for_model`, which override those in `model`), `training` (transformers' `TrainingArguments`) and, optionally,
`seeds`, `eval_blocks` (number of held-out blocks per evaluation, always the first ones) and `sequences_per_step` (over all
processes, by gradient accumulation).

The text is converted to a file of tokens once (:mod:`experiments.tokens`). The models are trained in turn, with checkpoints in
the output folder. A finished model is not trained again; an interrupted one continues from its last checkpoint, if `training`
saves any. `results.json` holds held-out loss and perplexity over training; `results.png` shows them, with a band over the
seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from pathlib import Path

import torch
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
from benchmarks.measure.machine import describe_machine
from benchmarks.report.plots import label_ends, plot_band, shown, style, tidy
from experiments import chunkwise
from experiments.text import TextArguments, vocabulary_size
from experiments.tokens import token_blocks


def checkpoint_folder(output: Path, name: str, seed: int) -> Path:
    return output / f'{name.replace(" ", "_")}-{seed}'


class MatrixDecayTrainer(Trainer):
    """Weight decay as in the authors' code, on tensors of two dimensions or more; the Trainer selects by name."""

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name, x in model.named_parameters() if x.dim() >= 2]


def accumulated_batches(sequences: int, arguments: TrainingArguments) -> int:
    """The number of batches to accumulate for one step of `sequences_per_step` sequences."""
    at_once = arguments.train_batch_size * arguments.world_size
    if sequences % at_once:
        raise ValueError(
            f'sequences_per_step={sequences} is not a multiple of the {at_once} sequences that {arguments.world_size} '
            f'processes take at once: change per_device_train_batch_size={arguments.per_device_train_batch_size}'
        )
    return sequences // at_once


def train_model(setting: dict, name: str, seed: int, output: Path, tokens: Path) -> dict:
    """Train one model of the setting; return its losses on held-out text."""
    started = time.process_time()
    text = TextArguments(**setting['text'])
    options = {'vocab_size': vocabulary_size(text)} | setting.get('model', {}) | setting['models'][name]
    folder = checkpoint_folder(output, name, seed)
    arguments = TrainingArguments(**{
        'output_dir': str(folder / 'trainer'), 'eval_strategy': 'steps', 'logging_strategy': 'steps', 'report_to': 'none',
        'save_strategy': 'no', **setting['training'], 'seed': seed,
    })
    if 'sequences_per_step' in setting:
        arguments.gradient_accumulation_steps = accumulated_batches(setting['sequences_per_step'], arguments)
    with arguments.main_process_first(desc='tokens'):
        train, held_out = (token_blocks(text, setting['block_size'], part, tokens) for part in (False, True))
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    trainer = MatrixDecayTrainer(
        model=model, args=arguments, data_collator=default_data_collator, train_dataset=train,
        eval_dataset=torch.utils.data.Subset(held_out, range(min(len(held_out), setting.get('eval_blocks', len(held_out))))),
    )
    trainer.remove_callback(PrinterCallback)
    has_checkpoint = (folder / 'trainer').is_dir() and get_last_checkpoint(str(folder / 'trainer'))
    trainer.train(resume_from_checkpoint=bool(has_checkpoint) or None)
    trainer.save_model(str(folder / 'checkpoint'))
    history = [(x['step'], x['eval_loss']) for x in trainer.state.log_history if 'eval_loss' in x]
    return {
        'model': name, 'seed': seed, 'options': options, 'parameters': model.num_parameters(), 'history': history,
        'loss': history[-1][1], 'perplexity': math.exp(history[-1][1]), 'seconds': time.process_time() - started,
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
    parser = argparse.ArgumentParser(prog='python -m experiments language_modeling', description=__doc__.splitlines()[0])
    parser.add_argument('setting', type=Path, help='JSON file with text, models and training')
    parser.add_argument('--output_dir', type=Path, help='folder for the results (default: outputs/<name of the setting>)')
    parser.add_argument('--tokens_dir', type=Path, help='folder of the files of tokens (default: outputs/tokens)')
    parser.add_argument('--models', nargs='+', metavar='NAME', help='only these of the setting (default: all)')
    options = parser.parse_args(args)
    setting = json.loads(options.setting.read_text())
    names = options.models or list(setting['models'])
    if unknown := [name for name in names if name not in setting['models']]:
        parser.error(f'--models: {unknown} are not in {options.setting}, which has {list(setting["models"])}')
    output = options.output_dir or Path('outputs') / options.setting.stem
    output.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    chunkwise.install_without_gpu()

    results = output / 'results.json'
    runs = json.loads(results.read_text())['runs'] if results.exists() else []
    done = [(run['model'], run['seed']) for run in runs]
    # torchrun's; a process of its own has none
    first = int(os.environ.get('RANK', 0)) == 0
    for seed, name in itertools.product(setting.get('seeds', [0]), names):
        if (name, seed) in done:
            continue
        if first:
            print(f'{name}, seed {seed}', flush=True)
        runs.append(train_model(setting, name, seed, output, options.tokens_dir or Path('outputs/tokens')))
        if first:
            report = {'setting': setting, 'machine': describe_machine(), 'runs': runs}
            results.write_text(json.dumps(report, indent=1) + '\n')
    if not first:
        return
    for run in runs:
        print(f'{run["model"]:>20}, seed {run["seed"]}: {run["parameters"]:,} parameters, loss {run["loss"]:.4f}, '
              f'perplexity {run["perplexity"]:.3f}, {run["seconds"]:.0f} s')
    draw({'setting': setting, 'runs': runs}, output / 'results.png')
