"""Multi-query associative recall (the paper's Fig. 4): mixers side by side over a grid, in one command.

    python -m benchmarks.mqar benchmarks/settings/mqar_exact.json [--output_dir outputs/mqar_exact]

A setting is a JSON file with fixed `options` (the task's, the model's and the run's of `examples/mqar`) and a `grid`, whose
combinations are trained one after the other; a `note` is for the results page. Finished runs are kept in `results.json`: the
same command goes on after an interruption. Where the grid has several learning rates, the one with the best held-out recall
counts, and its recall on other held-out sequences is the result. `results.png` is drawn from the same file (again with
`--plot_only`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from dataclasses import fields
from pathlib import Path

import transformers
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from transformers import AutoModelForCausalLM, PreTrainedConfig, set_seed

from benchmarks.measure.machine import describe_machine
from benchmarks.report.plots import tidy
from examples.mqar.config import ModelArguments, RunArguments
from examples.mqar.data import MQAR, HeldOut
from examples.mqar.evaluate import measure_recall
from examples.mqar.train import build_trainer, train
from fla_longhorn import LonghornConfig

LONGHORN = {
    'diagonal': {},
    'exact': {'exact': True},
    'scalar beta': {'scalar_beta': True},
    'exact, scalar beta': {'exact': True, 'scalar_beta': True},
    'diagonal, normalised keys': {'k_norm': 'l2'},
    'exact, normalised keys': {'exact': True, 'k_norm': 'l2'},
}
# fla's models, with what makes one the size of a Longhorn of the same width
OTHERS = {
    'GLA': ('gla', lambda cell: {'num_heads': 1, 'use_short_conv': True}),
    'DeltaNet': ('delta_net', lambda cell: {'num_heads': 1}),
    'Gated DeltaNet': ('gated_deltanet', lambda cell: {'num_heads': 1, 'head_dim': cell['hidden_size']}),
    'Mamba': ('mamba', lambda cell: {'state_size': cell['state_size']}),
}
DEFAULTS = {'mixer': 'diagonal', 'mlp_ratio': None, 'num_attention_heads': 1}


def model_config(cell: dict, task: MQAR) -> PreTrainedConfig:
    """The model of a cell: `examples/mqar`'s Longhorn, the same with attention for its mixers, or a model of fla's."""
    if cell['mixer'] in (*LONGHORN, 'attention'):
        config = ModelArguments(**chosen(cell, ModelArguments)).config(task)
        options = LONGHORN.get(cell['mixer'], {}) | {'hidden_ratio': cell['mlp_ratio']}
        if cell['mixer'] == 'attention':
            options['attn'] = {'layers': list(range(cell['num_hidden_layers'])), 'num_heads': cell['num_attention_heads']}
        return LonghornConfig(**config.to_dict() | options)
    model_type, options = OTHERS[cell['mixer']]
    return transformers.AutoConfig.for_model(
        model_type, hidden_size=cell['hidden_size'], num_hidden_layers=cell['num_hidden_layers'], vocab_size=task.vocab_size,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False, initializer_range=cell.get('initializer_range', 0.02),
        **({'hidden_ratio': cell['mlp_ratio']} if cell['mlp_ratio'] else {}), **options(cell),
    )


def chosen(cell: dict, dataclass: type) -> dict:
    return {field.name: cell[field.name] for field in fields(dataclass) if field.name in cell}


def grid_cells(setting: dict) -> list[dict]:
    """Every combination of the grid over the options; an entry that is an object sets several options at once."""
    cells = []
    for values in itertools.product(*setting['grid'].values()):
        cell = DEFAULTS | setting['options']
        for name, value in zip(setting['grid'], values, strict=True):
            cell |= value if isinstance(value, dict) else {name: value}
        cells.append(cell)
    return cells


def run_cell(cell: dict, output_dir: Path) -> dict:
    """Train one model and measure its recall."""
    started = time.perf_counter()
    task = MQAR(**chosen(cell, MQAR))
    run = RunArguments(**chosen(cell, RunArguments), output_dir=str(output_dir / 'run'))
    set_seed(run.seed)
    model = AutoModelForCausalLM.from_config(model_config(cell, task))
    trainer = build_trainer(model, task, run)
    train(trainer, run)
    history = [(x['step'], x['eval_recall']) for x in trainer.state.log_history if 'eval_recall' in x]
    return {
        'cell': cell,
        'parameters': model.num_parameters(),
        'history': history,
        'loss': trainer.state.log_history[-1]['train_loss'],
        'recall': measure_recall(model.eval(), HeldOut(task, run.test_size, (run.seed, 1)), run.batch_size),
        'seconds': time.perf_counter() - started,
    }


def best_runs(runs: list[dict]) -> list[dict]:
    """For cells that differ in the learning rate alone, the one with the best held-out recall at the end of training."""
    best = {}
    for run in runs:
        key = json.dumps({name: x for name, x in run['cell'].items() if name != 'learning_rate'}, sort_keys=True)
        if key not in best or run['history'][-1][1] > best[key]['history'][-1][1]:
            best[key] = run
    return list(best.values())


def summarize(runs: list[dict], names: list[str]) -> list[dict]:
    """Mean, lowest and highest recall over the seeds, for each combination of the options `names`."""
    groups = {}
    for run in best_runs(runs):
        groups.setdefault(tuple(run['cell'][name] for name in names), []).append(run['recall'])
    return [
        dict(zip(names, key, strict=True)) | {'mean': sum(x) / len(x), 'lowest': min(x), 'highest': max(x), 'seeds': len(x)}
        for key, x in groups.items()
    ]


def draw(setting: dict, runs: list[dict], path: Path) -> None:
    """One panel for each value of the setting's `panels`, one line for each mixer, seeds as a band around their mean."""
    runs, x_name, panel_name = best_runs(runs), setting['plot']['x'], setting['plot']['panels']
    panels = sorted({run['cell'][panel_name] for run in runs})
    columns = min(len(panels), 4)
    figure = Figure(figsize=(3.4 * columns, 3.2 * math.ceil(len(panels) / columns)), dpi=160, layout='constrained')
    axes = figure.subplots(math.ceil(len(panels) / columns), columns, sharey=True, squeeze=False).ravel()
    mixers = list(dict.fromkeys(run['cell']['mixer'] for run in runs))
    for panel, axis in zip(panels, axes, strict=False):
        for i, mixer in enumerate(mixers):
            points = {}
            for run in runs:
                if run['cell'][panel_name] == panel and run['cell']['mixer'] == mixer:
                    curve = run['history'] if x_name == 'step' else [(run['cell'][x_name], run['recall'])]
                    for x, recall in curve:
                        points.setdefault(x, []).append(recall)
            xs = sorted(points)
            axis.plot(xs, [sum(points[x]) / len(points[x]) for x in xs], color=f'C{i}', marker='o', markersize=3, label=mixer)
            axis.fill_between(xs, [min(points[x]) for x in xs], [max(points[x]) for x in xs], color=f'C{i}', alpha=0.15)
        axis.set(title=f'{panel_name} {panel}', xlabel=x_name, ylim=(0, 1.03))
        if x_name != 'step':
            axis.set_xscale('log', base=2)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        tidy(axis)
    axes[0].set_ylabel('recall')
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(setting['title'], fontsize=11)
    figure.savefig(path)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.mqar', description=__doc__.splitlines()[0])
    parser.add_argument('setting', type=Path, help='JSON file with the options and the grid')
    parser.add_argument('--output_dir', type=Path, help='where results go (default: outputs/<name of the setting>)')
    parser.add_argument('--plot_only', action='store_true', help='draw what results.json holds')
    options = parser.parse_args(args)
    setting = json.loads(options.setting.read_text())
    output = options.output_dir or Path('outputs') / options.setting.stem
    output.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    results = output / 'results.json'
    report = json.loads(results.read_text()) if results.exists() else {'runs': []}
    cells = grid_cells(setting)
    done = [run['cell'] for run in report['runs']]
    for i, cell in enumerate(cells):
        if options.plot_only or cell in done:
            continue
        described = ', '.join(f'{name} {cell[name]}' for name in setting['columns'])
        print(f'[{i + 1}/{len(cells)}] {described}', flush=True)
        run = run_cell(cell, output)
        print(f'    recall {run["recall"]:.2%} after {run["history"][-1][0]} steps, {run["seconds"]:.0f} s', flush=True)
        report = {'setting': setting, 'machine': describe_machine(), 'runs': [*report['runs'], run]}
        temporary = results.with_suffix('.tmp')
        temporary.write_text(json.dumps(report, indent=1) + '\n')
        os.replace(temporary, results)
    for row in summarize(report['runs'], [name for name in setting['columns'] if name not in ('seed', 'learning_rate')]):
        print(row)
    draw(setting, report['runs'], output / 'results.png')
