"""Time the launch parameters of a training step's kernels on the GPU at hand, and keep the fastest.

For each kernel, the rule's choice and its neighbours, which differ in one parameter. A neighbour is kept only if outputs and
gradients have the same bits as with the rules, and if its pass, forward or backward, takes at least `GAIN` less time. Kernels
of decoding are left out: the time of so short a launch is the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.ops.triton import tuned
from fla_longhorn.ops.triton.device import Card, card_of
from fla_longhorn.ops.triton.launch import RULES, LaunchConfig
from fla_longhorn.selfcheck.case import DTYPES, Case, make_inputs, make_options
from fla_longhorn.selfcheck.command import find_device
from fla_longhorn.selfcheck.compare import random_like
from fla_longhorn.selfcheck.compiling import add_model_options, compile_share, make_config

# less is noise between two runs of the timer
GAIN = 0.02
# returns the milliseconds that a call takes
Timer = Callable[[Callable[[], Any]], float]
# what is tried in place of a value: neither changes in which order numbers are added
NEXT: dict[str, Callable[[Any], tuple]] = {
    'num_warps': lambda x: (max(x // 2, 1), 2 * x),
    'num_stages': lambda x: (1, 2, 3),
    'maxnreg': lambda x: (None, 96, 128, 168),
    'BT': lambda x: (max(x // 2, 1), 2 * x),
    'BS': lambda x: (max(x // 2, 1), 2 * x),
    'BV': lambda x: (max(x // 2, 16), 2 * x),
    'U': lambda x: (1, 2, 4),
    'STAGES': lambda x: (max(x - 1, 1), x + 1),
    'ROWS': lambda x: (0, 4, 8),
    'PREFETCH': lambda x: (not x,),
    'RELOAD': lambda x: (not x,),
}
CHUNK = 'chunk_longhorn_exact_'
# the parameters of each rule that a buffer's layout and a sum's order don't depend on
TRIED = {
    'longhorn_prepare_kernel': ('BT', 'num_warps'),
    'longhorn_fwd_kernel': ('U',),
    'longhorn_bwd_kernel': ('maxnreg',),
    'longhorn_reduce_kernel': ('BT', 'num_warps'),
    'longhorn_segment_kernel': ('maxnreg',),
    'longhorn_combine_kernel': ('BS', 'num_warps'),
    f'{CHUNK}kernel_gram': ('num_warps',),
    f'{CHUNK}fwd_kernel_o': ('BV', 'num_warps', 'STAGES', 'PREFETCH', 'RELOAD', 'ROWS'),
    f'{CHUNK}fwd_kernel_o states': ('STAGES', 'RELOAD'),
    f'{CHUNK}bwd_kernel_replay': ('BV', 'num_warps', 'STAGES'),
    f'{CHUNK}bwd_kernel': ('BV', 'num_warps', 'STAGES', 'PREFETCH', 'RELOAD', 'ROWS'),
    f'{CHUNK}bwd_kernel_qk': ('num_warps', 'num_stages'),
}


def neighbours(name: str, config: LaunchConfig) -> Iterator[dict[str, Any]]:
    """Changes of one launch parameter each."""
    for parameter in TRIED[name]:
        old = getattr(config, parameter)
        for new in dict.fromkeys(NEXT[parameter](old)):
            if new != old:
                yield {parameter: new}


class Call:
    """A layer's call of the operator in training: its two passes, each of which can be run again."""

    def __init__(self, case: Case, exact: bool, device: torch.device) -> None:
        self.inputs = make_inputs(case, device)
        self.arguments: dict[str, Any] = {**self.inputs, **make_options(case, device, exact)}
        self.outputs = self.forward()
        self.upstream = random_like(self.outputs, 1, case.dtype)
        sizes = {name: getattr(case, name) for name in ('B', 'T', 'H', 'K', 'V', 'scalar_beta')}
        # the file of rules names the call that was timed
        self.described = {**sizes, 'exact': exact, 'dtype': str(case.dtype).removeprefix('torch.')}

    def forward(self) -> torch.Tensor:
        return chunk_longhorn(**self.arguments)[0]

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.outputs, list(self.inputs.values()), self.upstream, retain_graph=True)

    def run(self) -> list[torch.Tensor]:
        self.outputs = self.forward()
        return [self.outputs.detach(), *self.backward()]


@dataclass
class Rule:
    """A rule that a pass asks, the arguments it is asked with, and what it chooses."""

    name: str
    step: str
    arguments: tuple[int, int, str, Card]
    config: LaunchConfig


def rules_of(call: Call) -> list[Rule]:
    """The rules that a training step asks, each in the pass that asks it first."""
    asked: dict[str, Rule] = {}

    def note(name: str, rule: Callable, step: str, *arguments: Any) -> LaunchConfig:
        config = rule(*arguments)
        asked.setdefault(name, Rule(name, step, arguments, config))
        return config

    for step in ('forward', 'backward'):
        with mock.patch.dict(RULES, {name: partial(note, name, rule, step) for name, rule in RULES.items()}):
            getattr(call, step)()
    return [rule for rule in asked.values() if rule.name in TRIED]


def use(rule: Rule, changes: dict[str, Any]) -> Any:
    """Within it, `rule` chooses its parameters with `changes`; raises AssertionError where the record refuses them."""
    config = replace(rule.config, **changes)
    return mock.patch.dict(RULES, {rule.name: lambda *_: config})


def run_all(make: Callable[[], Call]) -> None:
    """Run a training step with the rules and with each neighbour."""
    call = make()
    for rule in rules_of(call):
        for changes in neighbours(rule.name, rule.config):
            # the process that times these changes reports why one fails
            with suppress(Exception), use(rule, changes):
                call.run()


def compile_all(make: Callable[[], Call], workers: int) -> int:
    """Compile what will be timed in `workers` processes; returns how many kernels that were."""
    with tempfile.TemporaryDirectory() as claims, ProcessPoolExecutor(workers, get_context('spawn')) as pool:
        shares = [pool.submit(compile_share, Path(claims), partial(run_all, make)) for _ in range(workers)]
        return sum(share.result().total() for share in shares)


def time_on_device(run: Callable[[], Any]) -> float:
    """The median, by the timer of Triton's autotuner."""
    return driver.active.get_benchmarker()(run, quantiles=(0.5, 0.2, 0.8))[0]


def tune(call: Call, timer: Timer = time_on_device, report: Callable[[dict], None] = lambda row: None) -> list[dict]:
    """Time all neighbours of all rules. Returns a row for each: the rule, changes, milliseconds of the pass and the verdict.

    The first row of a rule, without changes, has the time of its own choice; the verdict of the one to use is `fastest`.
    """
    wanted, rows = call.run(), []
    for rule in rules_of(call):
        K, V, precision, _ = rule.arguments
        about = {'rule': rule.name, 'key': tuned.key_of(K, V, precision), 'pass': rule.step, 'call': call.described}
        run = getattr(call, rule.step)
        own: dict[str, Any] = {**about, 'changes': {}, 'ms': timer(run), 'verdict': "the rule's"}
        of_rule = [own]
        report(own)
        for changes in neighbours(rule.name, rule.config):
            row: dict[str, Any] = {**about, 'changes': changes, 'ms': None, 'verdict': ''}
            try:
                with use(rule, changes):
                    if all(map(torch.equal, call.run(), wanted)):
                        row['ms'] = timer(run)
                    else:
                        row['verdict'] = 'other bits'
            # a neighbour may need more than the card has, or what Triton has no code for
            except Exception as error:
                row['verdict'] = f'{type(error).__name__}: {error}'.splitlines()[0]
            of_rule.append(row)
            report(row)
        call.run()
        # the clock of a card changes while it works
        own['ms'] = min(own['ms'], timer(run))
        best = min((row for row in of_rule if row['ms'] is not None), key=lambda row: row['ms'])
        if best['ms'] < (1 - GAIN) * own['ms']:
            best['verdict'] = 'fastest'
        rows += of_rule
    return rows


def save(path: str, rows: list[dict], card: Card) -> None:
    """Write the choices and all rows to `path`, beside those of other calls on the same card."""
    now = tuned.circumstances(card)
    content: dict[str, Any] = {'made_with': now, 'choices': {}, 'measured': []}
    if os.path.exists(path):
        with open(path, encoding='utf-8') as existing:
            old = json.load(existing)
        content = old if old['made_with'] == now else content
    for row in rows:
        # a rule's first row drops what was chosen for it before
        choices = content['choices'].setdefault(row['rule'], {})
        if not row['changes']:
            choices.pop(row['key'], None)
        if row['verdict'] == 'fastest':
            choices[row['key']] = row['changes']
    again = {(row['rule'], row['key']) for row in rows}
    content['measured'] = [row for row in content['measured'] if (row['rule'], row['key']) not in again] + rows
    with open(f'{path}.part', 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=2)
    os.replace(file.name, path)


def main(args: list[str] | None = None) -> int:
    """Tune for a model's training step and write the file; exits with 2 for a wrong option."""
    options = parse_args(args)
    # what is timed first is the rules' choice
    tuned.PATH = None
    card, config = card_of(options.device), make_config(options)
    try:
        # an hour of timing is not lost to a file that cannot be added to
        save(options.output, [], card)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f'--output {options.output} cannot be added to: {type(error).__name__}: {error}') from error
    case = Case(
        B=options.batch_size, T=options.seq_len, H=config.num_heads, K=config.state_size,
        V=round(config.hidden_size * config.expand) // config.num_heads, dtype=DTYPES[options.dtype],
        scalar_beta=config.scalar_beta, sigmoid=True, D=True, z=True, final_state=False,
        allow_neg_eigval=config.allow_neg_eigval,
    )
    make = partial(Call, case, config.exact, options.device)
    if options.workers > 1:
        print(f'compiled {compile_all(make, options.workers)} kernels in {options.workers} processes', flush=True)

    def report(row: dict) -> None:
        changes = ', '.join(f'{name} = {value}' for name, value in row['changes'].items())
        time = '' if row['ms'] is None else f'{row["ms"]:.4f} ms'
        print(f'{row["rule"]:44}{row["pass"]:10}{changes:18}{time:14}{row["verdict"]}'.rstrip(), flush=True)

    rows = tune(make(), report=report)
    save(options.output, rows, card)
    for row in rows:
        if row['verdict'] == 'fastest':
            report(row)
    fastest = sum(row['verdict'] == 'fastest' for row in rows)
    print(f'{fastest} of {sum(not row["changes"] for row in rows)} kernels are faster with other parameters. To use them:\n'
          f'export {tuned.VARIABLE}={os.path.abspath(options.output)}')
    return 0


def parse_args(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='python -m fla_longhorn.tune',
        description="Time the launch parameters of a training step's Longhorn kernels on a GPU: those that the package "
        'chooses, and their neighbours. Results stay the same to the bit.',
    )
    parser.add_argument('--device', help='cuda, cuda:1, ...')
    parser.add_argument('--dtype', choices=DTYPES, default='bfloat16', help="of the operator's inputs, which autocast chooses")
    parser.add_argument('--workers', type=int, default=min(os.cpu_count() or 1, 8), help='processes that compile')
    parser.add_argument('--output', metavar='FILE', default='tuned.json', help='choices and times, beside those that it has')
    add_model_options(parser)
    options = parser.parse_args(args)
    if not find_device(parser, options):
        parser.error(f'there is nothing to tune without a GPU; the device is {options.device}')
    config = make_config(options)
    if config.model_type != 'longhorn' or config.gate:
        parser.error('--config is of a model whose calls these kernels are not: it must be a Longhorn model without a gate')
    return options


if __name__ == '__main__':
    raise SystemExit(main())
