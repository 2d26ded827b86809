"""Compares Longhorn's language model with others of fla and transformers in one run: training steps and generation.

    python -m benchmarks model [--device cuda] [--size 120m] [--dtypes float32 bfloat16] [--batches 1 8]
        [--prompts 64 8192] [--json FILE] [--compare OLD.json]

Training: forward, backward and AdamW on random tokens, on a GPU under bfloat16 autocast; tokens per second (from the median
step), and peak memory beyond the model's and the optimizer's own. Generation, greedy, with weights in each of `--dtypes`:
milliseconds of the prompt with its first token and of each later token (median and quartiles), and bytes of the cache, for
several batch sizes and prompt lengths. The models take turns. `registry.py` says how they get equal numbers of parameters.

The default is the paper's 120M size in bfloat16 on a GPU, a small size in float32 on a CPU.
A model that cannot run is reported with the reason. A prompt that a model cannot run, or that would take more than
`--prompt_seconds`, is skipped. An interrupt reports the results so far; the JSON is written after every group of times.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from benchmarks.models.generation import TURNS, System, measure_generation
from benchmarks.models.registry import MODELS, SIZES, Row, Size
from benchmarks.models.training import measure_training


class Run:
    """The models to measure, and the report so far."""

    def __init__(self, options: argparse.Namespace, size: Size, models: list[Row]):
        self.size, self.device, self.json = size, torch.device(options.device), options.json
        self.seconds, self.prompt_seconds, self.dtypes = options.seconds, options.prompt_seconds, options.dtypes
        self.models = models
        self.rows = {row.name: {'model': row.name, 'status': 'not run'} for row in models}
        self.report = {
            'machine': describe_machine(self.device), 'name': options.size, 'size': asdict(size), 'dtypes': options.dtypes,
            'turns': TURNS, 'rows': list(self.rows.values()),
        }

    def fail(self, errors: dict[str, str]) -> None:
        """Record why rows have no figures; the first reason stays."""
        for name, reason in errors.items():
            self.rows[name].setdefault('reason', reason)

    def build(self, dtype: torch.dtype) -> list[tuple[Row, PreTrainedModel]]:
        """The models that can be built here."""
        models = []
        for row in self.models:
            if self.device.type in row.cannot:
                self.fail({row.name: row.cannot[self.device.type]})
                continue
            errors: dict[str, str] = {}
            with timing.noted(errors, row.name):
                torch.manual_seed(0)
                model = row.build(row.config(self.size)).to(self.device, dtype)
                models.append((row, model))
                self.rows[row.name]['parameters'] = model.num_parameters()
            self.fail(errors)
        return models

    def train(self) -> None:
        errors: dict[str, str] = {}
        models = {row.name: model for row, model in self.build(torch.float32)}
        for name, figures in measure_training(models, self.size, self.device, self.seconds, errors).items():
            self.rows[name] |= {'status': 'ok', 'training': figures}
        self.fail(errors)
        self.write()

    def generate(self, dtype: str) -> None:
        systems = [System(row.name, model.eval()) for row, model in self.build(getattr(torch, dtype))]
        for batch in self.size.batches:
            for prompt in self.size.prompts:
                self.generate_after(systems, dtype, batch, prompt)

    def generate_after(self, systems: list[System], dtype: str, batch: int, prompt: int) -> None:
        errors, able = {}, []
        for system in systems:
            expected = system.expected_seconds(batch * prompt)
            if expected > self.prompt_seconds:
                errors[system.name] = f'it would take {expected:.0f} s, judged by the one before'
            else:
                able.append(system)
        figures = measure_generation(able, self.size, batch, prompt, self.device, self.seconds, errors)
        print(f'\n{dtype}, batch {batch}, a prompt of {prompt} tokens')
        for system in systems:
            row = self.rows[system.name]
            if system.name in figures:
                row['status'] = 'ok'
                row.setdefault('generation', []).append({'dtype': dtype} | figures[system.name])
                print_generation(system.name, figures[system.name])
            else:
                left = {'dtype': dtype, 'batch': batch, 'prompt': prompt, 'reason': errors[system.name]}
                row.setdefault('left_out', []).append(left)
                self.fail(errors)
                print(f'{system.name:40}{errors[system.name]}', flush=True)
        self.write()

    def measure(self, training: bool) -> None:
        try:
            if training:
                print(f'\n{"training":40}{"parameters":>10}{"tokens/s":>12}{"peak MB":>10}', flush=True)
                self.train()
                for row in self.rows.values():
                    if 'training' in row:
                        print_training(row)
            for dtype in self.dtypes:
                self.generate(dtype)
        except KeyboardInterrupt:
            print('stopped')
        for row in self.rows.values():
            if row['status'] == 'ok':
                row.pop('reason', None)
            else:
                print(f'{row["model"]:40}not run: {row.setdefault("reason", "stopped before")}')
        self.write()

    def write(self) -> None:
        if self.json:
            timing.write_report(self.report, self.json)


def print_training(row: dict) -> None:
    figures = row['training']
    peak = '' if figures['peak_bytes'] is None else f'{figures["peak_bytes"] / 2**20:.0f}'
    print(f'{row["model"]:40}{row["parameters"] / 1e6:9.2f}M{figures["tokens_per_s"]:12.0f}{peak:>10}', flush=True)


def print_generation(name: str, figures: dict) -> None:
    token = figures['token']
    print(f'{name:40}{token["ms"]:9.2f} ms a token ({token["ms_low"]:.2f} to {token["ms_high"]:.2f})'
          f'{figures["first"]["ms"]:10.1f} ms the prompt{figures["state_bytes"] / 2**10:11.0f} KB', flush=True)


def times_by_name(report: dict) -> dict[str, dict]:
    times = {}
    for row in report['rows']:
        if 'training' in row:
            times[f'{row["model"]}, training step'] = row['training']
        for x in row.get('generation', ()):
            times[f'{row["model"]}, {x["dtype"]}, batch {x["batch"]}, token after {x["prompt"]}'] = x['token']
    return times


def parse_arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks model', description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', choices=('cpu', 'cuda'))
    parser.add_argument('--size', choices=list(SIZES), help='default: 120m on a GPU, else small')
    parser.add_argument('--models', nargs='+', help='only models with one of these in their name')
    parser.add_argument('--skip_training', action='store_true', help='generation only')
    parser.add_argument('--dtypes', nargs='+', choices=('float32', 'float16', 'bfloat16'), help='of the weights in generation '
                        '(default: bfloat16 on a GPU, else float32)')
    parser.add_argument('--seconds', type=float, help='of repeats for each time (default: 2 on a GPU, else 0.2)')
    parser.add_argument('--prompt_seconds', type=float, default=20, help='skip prompts that take longer (default: 20)')
    for name in ('hidden_size', 'blocks', 'batch_size', 'seq_len', 'new_tokens'):
        parser.add_argument(f'--{name}', type=int)
    parser.add_argument('--batches', type=int, nargs='+', help='sequences that generate together')
    parser.add_argument('--prompts', type=int, nargs='+', help='tokens in them')
    timing.add_report_arguments(parser)
    options = parser.parse_args(args)
    gpu = options.device == 'cuda'
    options.size = options.size or ('120m' if gpu else 'small')
    options.dtypes = options.dtypes or ['bfloat16' if gpu else 'float32']
    if options.seconds is None:
        options.seconds = 2.0 if gpu else 0.2
    return options


def main(args: list[str] | None = None) -> None:
    options = parse_arguments(args)
    known = SIZES[options.size]
    size = replace(known, **{x: getattr(options, x) for x in asdict(known) if getattr(options, x, None) is not None})
    other = json.loads(Path(options.compare).read_text()) if options.compare else None
    transformers.logging.set_verbosity_error()

    models = [row for row in MODELS if not options.models or any(part in row.name for part in options.models)]
    run = Run(options, size, models)
    machine = run.report['machine']
    print(f'{machine["device"]}, {machine["threads"]} threads, commit {machine["commit"]}')
    print(', '.join(f'{name} {value}' for name, value in asdict(size).items()))
    run.measure(training=not options.skip_training)
    if other:
        print('\n'.join([f'\nagainst {options.compare}:', *timing.compare(run.report, other, times_by_name)]))
    if options.json:
        print(f'\nwritten to {options.json}')
