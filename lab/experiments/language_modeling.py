"""Language modelling (the paper's Table 1 and Fig. 5): models side by side on one text, through transformers' Trainer.

    python -m lab.experiments language_modeling lab/experiments/settings/lm_small.json [--output_dir outputs/lm_small]
    torchrun --nproc-per-node 8 -m lab.experiments language_modeling lab/experiments/settings/lm_350M.json

A setting is a JSON file: `text` (`examples.text.corpus.TextArguments`), `block_size`, `models` (by name, the keywords of
`AutoConfig.for_model`, which override those in `model`), `training` (transformers' `TrainingArguments`) and, optionally,
`seeds`, `eval_blocks` (number of held-out blocks per evaluation, always the first ones), `sequences_per_step` (over all
processes, by gradient accumulation) and `search`. With `search`, `{"learning_rates": [...], "max_steps": N}`, a model first
trains N steps at each rate, and at half the lowest or twice the highest for as long as that is the best; it is then trained
at the rate with the lowest loss on other held-out blocks, those after the first `eval_blocks`. A model with a `learning_rate`
of its own keeps it; with `slow_gate`, decays start as `slow_decays` of `gated.py` has them.

The text is converted to a file of tokens once (`tokens.py`). The models are trained in turn, with checkpoints in
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
from benchmarks.report.plots import label_ends, plot_band, shown, style, tidy
from examples.mqar.train import Progress
from examples.text.corpus import TextArguments, vocabulary_size
from fla_longhorn.layers.gate import Gate
from lab.experiments import finished, without_gpu
from lab.experiments.gated import slow_decays
from lab.experiments.tokens import token_blocks


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


def train_model(setting: dict, name: str, seed: int, output: Path, tokens: Path, first_block: int = 0) -> dict:
    """Train one model of the setting; return its losses on `eval_blocks` of held-out text from `first_block`."""
    started = time.process_time()
    text = TextArguments(**setting['text'])
    options = {'vocab_size': vocabulary_size(text)} | setting.get('model', {}) | setting['models'][name]
    options.pop('learning_rate', None)
    slow = options.pop('slow_gate', False)
    folder = checkpoint_folder(output, name, seed)
    arguments = TrainingArguments(**{
        'output_dir': str(folder / 'trainer'), 'eval_strategy': 'steps', 'logging_strategy': 'steps', 'report_to': 'none',
        'save_strategy': 'no', **setting['training'], 'seed': seed,
    })
    if 'sequences_per_step' in setting:
        arguments.gradient_accumulation_steps = accumulated_batches(setting['sequences_per_step'], arguments)
    with arguments.main_process_first(desc='tokens'):
        train, held_out = (token_blocks(text, setting['block_size'], part, tokens) for part in (False, True))
    eval_blocks = range(first_block, min(len(held_out), first_block + setting.get('eval_blocks', len(held_out))))
    if not eval_blocks:
        raise ValueError(f'eval_blocks={first_block} leaves none of the {len(held_out)} held-out blocks to search on')
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    for gate in model.modules() if slow else ():
        if isinstance(gate, Gate):
            slow_decays(gate)
    trainer = MatrixDecayTrainer(
        model=model, args=arguments, data_collator=default_data_collator, train_dataset=train,
        eval_dataset=torch.utils.data.Subset(held_out, eval_blocks),
    )
    trainer.remove_callback(PrinterCallback)
    if is_first():
        trainer.add_callback(Progress('loss', name))
    has_checkpoint = (folder / 'trainer').is_dir() and get_last_checkpoint(str(folder / 'trainer'))
    trainer.train(resume_from_checkpoint=bool(has_checkpoint) or None)
    trainer.save_model(str(folder / 'checkpoint'))
    history = [(x['step'], x['eval_loss']) for x in trainer.state.log_history if 'eval_loss' in x]
    return {
        'model': name, 'seed': seed, 'learning_rate': arguments.learning_rate, 'options': options,
        'parameters': model.num_parameters(), 'history': history, 'loss': history[-1][1],
        'perplexity': math.exp(history[-1][1]), 'seconds': time.process_time() - started,
    }


def with_training(setting: dict, **options) -> dict:
    return setting | {'training': setting['training'] | options}


def short_losses(searched: list[dict], name: str) -> dict[float, float]:
    """The losses of a model's short runs, by learning rate; infinite if training diverged."""
    losses = {run['learning_rate']: run['loss'] for run in searched if run['model'] == name}
    return {rate: math.inf if math.isnan(loss) else loss for rate, loss in losses.items()}


def next_rate(setting: dict, searched: list[dict], name: str) -> float | None:
    """The rate of a model's next short run, or `None` after the search.

    After `learning_rates` the search goes on, by factors of two, while the best rate is the lowest or the highest.
    """
    if 'search' not in setting or 'learning_rate' in setting['models'][name]:
        return None
    losses = short_losses(searched, name)
    for rate in setting['search']['learning_rates']:
        if rate not in losses:
            return rate
    best = min(losses, key=losses.__getitem__)
    return best / 2 if best == min(losses) else 2 * best if best == max(losses) else None


def own_rate(setting: dict, searched: list[dict], name: str) -> dict[str, float]:
    """A model's own `learning_rate`, or that with the lowest loss of its short runs, if there are any."""
    if 'learning_rate' in setting['models'][name]:
        return {'learning_rate': setting['models'][name]['learning_rate']}
    losses = short_losses(searched, name)
    return {'learning_rate': min(losses, key=losses.__getitem__)} if losses else {}


def draw(report: dict, path: Path | str) -> None:
    """Losses against steps and, if the setting has `against_time`, against processor time, even over a run's steps."""
    scales = {'step': lambda run: 1.}
    if report['setting'].get('against_time'):
        scales['processor minutes'] = lambda run: run['seconds'] / 60 / run['history'][-1][0]
    figure = Figure(figsize=(8.5 if len(scales) == 1 else 12, 4.4), dpi=140, layout='constrained')
    axes = figure.subplots(1, len(scales), squeeze=False)[0]
    runs = {}
    for run in report['runs']:
        runs.setdefault(run['model'], []).append(run)
    losses = {name: sum(run['loss'] for run in some) / len(some) for name, some in runs.items()}
    names = shown(list(runs), losses)
    for axis, (label, scale) in zip(axes, scales.items(), strict=True):
        for name in names:
            curves, factor = [run['history'] for run in runs[name]], sum(map(scale, runs[name])) / len(runs[name])
            plot_band(axis, [factor * step for step, _ in curves[0]], [[loss for _, loss in x] for x in curves],
                      f'{losses[name]:.3f}  {name}', style(name, names))
        axis.set(xlabel=label, ylabel='held-out loss (nats a token)')
        tidy(axis)
        label_ends(axis)
    figure.suptitle(report['setting']['title'], fontsize=10)
    figure.savefig(path)


def is_first() -> bool:
    """Whether this is torchrun's first process, or a process of its own."""
    return int(os.environ.get('RANK', 0)) == 0


def train_models(setting: dict, names: list[str], output: Path, tokens: Path) -> dict:
    """Search the models' rates and train them, except for the runs that `results.json` has; return the report."""
    results = output / 'results.json'
    report = {'search': []} | finished.read(results)

    def add(part: str, run: dict) -> None:
        report[part].append(run)
        if is_first():
            finished.add(results, setting, run, part)

    def announce(described: str) -> None:
        if is_first():
            print(described, flush=True)

    seeds = setting.get('seeds', [0])
    for name in names:
        while rate := next_rate(setting, report['search'], name):
            steps = setting['search']['max_steps']
            announce(f'{name}, seed {seeds[0]}, {steps} steps at the rate {rate:g}')
            short = with_training(setting, learning_rate=rate, max_steps=steps, save_strategy='no')
            folder = output / f'search-{rate:g}'
            add('search', train_model(short, name, seeds[0], folder, tokens, first_block=setting['eval_blocks']))
    for seed, name in itertools.product(seeds, names):
        if any((run['model'], run['seed']) == (name, seed) for run in report['runs']):
            continue
        announce(f'{name}, seed {seed}')
        chosen = with_training(setting, **own_rate(setting, report['search'], name))
        add('runs', train_model(chosen, name, seed, output, tokens))
    return report


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.experiments language_modeling', description=__doc__.splitlines()[0])
    parser.add_argument('setting', type=Path, help='JSON file with text, models and training')
    parser.add_argument('--output_dir', type=Path, help='folder for the results (default: outputs/<name of the setting>)')
    parser.add_argument('--tokens_dir', type=Path, help='folder of the files of tokens (default: outputs/tokens)')
    parser.add_argument('--models', nargs='+', metavar='NAME', help='only these of the setting (default: all)')
    options = parser.parse_args(args)
    setting = json.loads(options.setting.read_text())
    names = options.models or list(setting['models'])
    if unknown := [name for name in names if name not in setting['models']]:
        parser.error(f'--models: {unknown} are not in {options.setting}, which has {list(setting["models"])}')
    if 'search' in setting and 'eval_blocks' not in setting:
        parser.error(f'search in {options.setting} needs eval_blocks: it takes the held-out blocks after those')
    output = options.output_dir or Path('outputs') / options.setting.stem
    output.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    without_gpu.install()

    report = train_models(setting, names, output, options.tokens_dir or Path('outputs/tokens'))
    if not is_first():
        return
    for run in report['runs']:
        print(f'{run["model"]:>20}, seed {run["seed"]}: {run["parameters"]:,} parameters, loss {run["loss"]:.4f}, '
              f'perplexity {run["perplexity"]:.3f}, {run["seconds"]:.0f} s of processor time')
    draw(report | {'setting': setting}, output / 'results.png')
    print(f'written to {output}/results.json and results.png')
