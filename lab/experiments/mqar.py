"""Multi-query associative recall (the paper's Fig. 4): mixers side by side over a grid, in one command.

    python -m lab.experiments mqar lab/experiments/settings/mqar_exact.json [--output_dir outputs/mqar_exact]

A setting is a JSON file with fixed `options` (of the task, the model and the run, see `examples/mqar`) and a `grid`, whose
combinations are trained one after the other; a `note` is for the results page. With `rules` `zoology` or `synthetic`, task and
training are those of `zoology.py` or `synthetic.py`. `results.json` keeps finished runs: after an
interruption, the same command continues. Started twice, it trains two runs at a time, and `--only learning_rate=0.01` leaves
out other rates. `results.png` is drawn at the end (again with `--plot_only`).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Trainer, set_seed

from examples.mqar.config import ModelArguments, RunArguments
from examples.mqar.data import MQAR, HeldOut
from examples.mqar.evaluate import measure_recall
from examples.mqar.train import build_trainer, train
from fla_longhorn import LonghornConfig
from lab.experiments import finished, gated, synthetic, without_gpu, zoology
from lab.experiments.recall import draw, summarize

# steps twice as long, so that a token may change the sign of what is in memory
DOUBLED = 'negative eigenvalues'
LONGHORN = {
    'diagonal': {},
    'exact': {'exact': True},
    'scalar beta': {'scalar_beta': True},
    'exact, scalar beta': {'exact': True, 'scalar_beta': True},
    'diagonal, normalised keys': {'k_norm': 'l2'},
    'exact, normalised keys': {'exact': True, 'k_norm': 'l2'},
    'diagonal, tied q and k': {'tie_qk': True},
    'exact, tied q and k': {'exact': True, 'tie_qk': True},
    'diagonal, value projection': {'value_proj': True},
    'exact, value projection': {'exact': True, 'value_proj': True},
    **{f'{name}, {DOUBLED}': {'exact': name == 'exact', 'allow_neg_eigval': True} for name in ('diagonal', 'exact')},
}
# fla's models, and transformers' Mamba, whose scan can be replaced; with what makes one as large as a Longhorn of its width
OTHERS = {
    'GLA': ('gla', lambda cell: {'num_heads': 1, 'use_short_conv': True}),
    'DeltaNet': ('delta_net', lambda cell: {'num_heads': 1}),
    'Gated DeltaNet': ('gated_deltanet', lambda cell: heads_of(cell)),
    'DeltaNet, negative eigenvalues': ('delta_net', lambda cell: {'num_heads': 1, 'allow_neg_eigval': True}),
    'Mamba': (transformers.MambaConfig, lambda cell: {'state_size': cell['state_size']}),
    'Mamba2': ('mamba2', lambda cell: {'num_heads': cell['hidden_size'] // 32, 'head_dim': 64}),
    'Mamba3': ('mamba3', lambda cell: {'num_heads': cell['hidden_size'] // 32, 'head_dim': 64}),
    'KDA': ('kda', lambda cell: heads_of(cell)),
    'MesaNet': ('mesa_net', lambda cell: {'num_heads': 1, 'head_dim': cell['hidden_size']}),
    'RWKV-7': ('rwkv7', lambda cell: {'head_dim': 64}),
    'preconditioned KDA': ('precond_kda', lambda cell: {'num_heads': 1, 'head_dim': cell['hidden_size']}),
    'preconditioned Gated DeltaNet': (
        'precond_gated_deltanet', lambda cell: {'num_heads': 1, 'head_dim': cell['hidden_size']},
    ),
}


def heads_of(cell: dict) -> dict:
    """One head as wide as the model, or a cell's own."""
    names = ('num_heads', 'head_dim', 'expand_v', 'allow_neg_eigval')
    return {'num_heads': 1, 'head_dim': cell['hidden_size']} | {name: cell[name] for name in names if name in cell}


RULES = {'zoology': zoology.run_cell, 'synthetic': synthetic.run_cell}
# these have no implementation in PyTorch here or in fla that trains in reasonable time
ON_A_GPU = ('Mamba3', 'MesaNet', 'RWKV-7', 'preconditioned KDA', 'preconditioned Gated DeltaNet')
# a setting's options that the model takes
MODEL_OPTIONS = ('initializer_range', 'tie_word_embeddings', 'conv_size', 'gate')
DEFAULTS = {'mixer': 'diagonal', 'mlp_ratio': None, 'num_attention_heads': 1}


def model_config(cell: dict, task: MQAR) -> PreTrainedConfig:
    """The model of a cell: `examples/mqar`'s Longhorn, the same with attention for its mixers, or a model of fla's."""
    if cell['mixer'] in (*LONGHORN, 'attention'):
        config = ModelArguments(**chosen(cell, ModelArguments)).config(task)
        options = {'exact': False} | LONGHORN.get(cell['mixer'], {}) | {'hidden_ratio': cell['mlp_ratio']}
        options |= {name: cell[name] for name in MODEL_OPTIONS if name in cell}
        if 'doubled' in cell:
            options['allow_neg_eigval'] = cell['doubled']
        if cell['mixer'] == 'attention':
            options['attn'] = {'layers': list(range(cell['num_hidden_layers'])), 'num_heads': cell['num_attention_heads']}
        return LonghornConfig(**config.to_dict() | options)
    kind, options = OTHERS[cell['mixer']]
    config = kind if isinstance(kind, type) else partial(transformers.AutoConfig.for_model, kind)
    return config(
        hidden_size=cell['hidden_size'], num_hidden_layers=cell['num_hidden_layers'], vocab_size=task.vocab_size,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=cell.get('tie_word_embeddings', False),
        initializer_range=cell.get('initializer_range', 0.02),
        **({'hidden_ratio': cell['mlp_ratio']} if cell['mlp_ratio'] else {}), **options(cell),
    )


class NoMLP(nn.Module):
    def forward(self, x: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.zeros_like(x)


@torch.no_grad()
def build_model(cell: dict, task: MQAR) -> PreTrainedModel:
    """A cell's model.

    Its `residual_scale` multiplies the initial weights of the blocks' last projections, its `branch_factor` their outputs.
    """
    model = AutoModelForCausalLM.from_config(model_config(cell, task))
    for block in model.model.layers if hasattr(model, 'model') else ():
        if 'gate_rank' in cell:
            gated.set_gate_rank(block.attn, cell['gate_rank'], cell.get('initializer_range', 0.02))
        if 'residual_scale' in cell:
            block.attn.out_proj.weight.mul_(cell['residual_scale'])
        if 'branch_factor' in cell:
            block.attn.out_proj.register_forward_hook(lambda module, args, out: cell['branch_factor'] * out)
        # fla's blocks have one always
        if cell['mixer'] in OTHERS and not cell['mlp_ratio'] and hasattr(block, 'mlp'):
            block.mlp = NoMLP()
    return model


def needs_gpu(cell: dict) -> bool:
    return cell['mixer'] in ON_A_GPU


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


def run_cell(cell: dict, folder: Path) -> dict:
    """Train one model and measure its recall."""
    started = time.process_time()
    task = MQAR(**chosen(cell, MQAR))
    run = RunArguments(**chosen(cell, RunArguments), output_dir=str(folder))
    set_seed(run.seed)
    model = build_model(cell, task)
    trainer = build_trainer(model, task, run, zoology.QueryTrainer)
    if 'embedding_rate' in cell:
        set_embedding_rate(trainer, cell['embedding_rate'])
    train(trainer, run)
    history = [(x['step'], x['eval_recall']) for x in trainer.state.log_history if 'eval_recall' in x]
    return {
        'cell': cell,
        'parameters': model.num_parameters(),
        'history': history,
        'loss': trainer.state.log_history[-1]['train_loss'],
        'recall': measure_recall(model.eval(), HeldOut(task, run.test_size, (run.seed, 1)), run.batch_size),
        'seconds': time.process_time() - started,
    }


def set_embedding_rate(trainer: Trainer, factor: float) -> None:
    """Have the embeddings learn with `factor` times the rate of the other parameters."""
    weight = trainer.model.get_input_embeddings().weight
    optimizer = trainer.create_optimizer()
    group = next(group for group in optimizer.param_groups if any(x is weight for x in group['params']))
    group['params'] = [x for x in group['params'] if x is not weight]
    optimizer.add_param_group({**group, 'params': [weight], 'lr': factor * trainer.args.learning_rate})


def cells_with(wanted: list[str], cells: list[dict]) -> list[dict]:
    """The cells that have one of the wanted values (`name=value`) of each name among them."""
    values: dict[str, list[str]] = {}
    for name, _, value in (x.partition('=') for x in wanted):
        values.setdefault(name, []).append(value)
    return [cell for cell in cells if all(str(cell.get(name)) in some for name, some in values.items())]


def train_cells(setting: dict, cells: list[dict], results: Path) -> None:
    """Train the cells that neither `results` has nor another process is training."""
    train_cell = partial(RULES[setting['rules']], build_model=build_model) if 'rules' in setting else run_cell
    for i, cell in enumerate(cells):
        described = f'[{i + 1}/{len(cells)}] ' + ', '.join(f'{name} {cell[name]}' for name in setting['columns'])
        if needs_gpu(cell) and not torch.cuda.is_available():
            print(f'{described}: not run, its kernels need a GPU', flush=True)
            continue
        folder = results.parent / f'run-{hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()[:12]}'
        with finished.claimed(folder) as mine:
            if not mine or any(run['cell'] == cell for run in finished.read(results)['runs']):
                continue
            print(described, flush=True)
            run = train_cell(cell, folder)
            print(f'    recall {run["recall"]:.2%} after {run["history"][-1][0]} steps, {run["seconds"]:.0f} s', flush=True)
            finished.add(results, setting, run)
            shutil.rmtree(folder, ignore_errors=True)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.experiments mqar', description=__doc__.splitlines()[0])
    parser.add_argument('setting', type=Path, help='JSON file with the options and the grid')
    parser.add_argument('--output_dir', type=Path, help='folder for the results (default: outputs/<name of the setting>)')
    parser.add_argument(
        '--only', nargs='+', metavar='NAME=VALUE', default=[], help='train only cells with one of the values given for a name',
    )
    parser.add_argument('--plot_only', action='store_true', help='only draw results.json')
    options = parser.parse_args(args)
    setting = {'name': options.setting.stem} | json.loads(options.setting.read_text())
    output = options.output_dir or Path('outputs') / options.setting.stem
    output.mkdir(parents=True, exist_ok=True)
    results = output / 'results.json'
    if not options.plot_only:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        without_gpu.install()
        cells = cells_with(options.only, grid_cells(setting))
        if not cells:
            parser.error(f'--only {" ".join(options.only)}: no cell of {options.setting} has these')
        train_cells(setting, cells, results)

    report = finished.read(results) | {'setting': setting}
    for row in summarize(report['runs'], [name for name in setting['columns'] if name not in ('seed', 'learning_rate')]):
        print(row)
    draw(report, output / 'results.png')
