"""All that should run on a new GPU, the most important first: tests, the self check, the benchmarks.

    python -m benchmarks all --output_dir DIR [--device cuda] [--steps tests ops ...] [--limit SECONDS] [--tiny]

Each step is a separate command with a time limit, after which it is interrupted; the benchmarks then write what they have. The
next step runs even if one fails or times out. Logs, JSON and PNG go to the folder, named after the device as in
`benchmarks/results`; `summary.json` says what passed. The exit status is 1 if a step failed. `--tiny` takes seconds on a CPU,
for a trial run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure.machine import device_name

ROOT = Path(__file__).parents[1]
# for an interrupted command to write its results
GRACE = 30


@dataclass(frozen=True)
class Step:
    """A command (arguments of Python, names in braces are filled in) and its time limit in seconds."""

    name: str
    limit: int
    command: str
    tiny: str

    def arguments(self, tiny: bool, **values) -> list[str]:
        return [word.format(**values) for word in f'{self.command} {self.tiny if tiny else ""}'.split()]


# in order of importance
STEPS = (
    Step(
        'tests', 560,
        '-m pytest -q -p no:cacheprovider --seconds 480 -n {workers} --dist worksteal --device {device} '
        'tests/ops tests/layers tests/models '
        'tests/torch_compile tests/integration/test_packing.py tests/integration/test_attn_mode.py',
        '--ignore tests/models --ignore tests/torch_compile --ignore tests/layers --ignore tests/integration -k test_opcheck',
    ),
    Step(
        'selfcheck', 400,
        '-m fla_longhorn.selfcheck --device {device} --workers {workers} --json {out}/{device_name}_selfcheck.json',
        '--quick --dtype float32',
    ),
    Step(
        'ops', 560,
        '-m benchmarks ops --device {device} --sets paper K T equal_state --verify_outputs 4096 --seconds 0.1 '
        '--workers {workers} --json {out}/{device_name}_ops.json --plot {out}/{device_name}_ops.png',
        '--shape B=1 T=16 H=1 K=4 V=8 --seconds 0 --operators chunk_longhorn',
    ),
    Step(
        'model', 420, '-m benchmarks model --device {device} --json {out}/{device_name}_model.json '
        '--plot {out}/{device_name}_model.png',
        '--hidden_size 32 --blocks 1 --batch_size 1 --seq_len 16 --prompts 8 --new_tokens 2 --seconds 0 --models Longhorn',
    ),
    Step(
        'mqar', 240, '-m examples.mqar --device {device} --output_dir {out}/{device_name}_mqar',
        '--vocab_size 16 --seq_len 16 --num_pairs 2 --hidden_size 16 --state_size 4 --steps 20 --batch_size 4 '
        '--warmup_steps 1 --eval_size 8 --test_size 8 --test_size_per_count 4 --num_questions 1 --target_recall 0',
    ),
)


def run_step(arguments: list[str], log: Path, limit: float) -> str:
    """Run Python with these arguments until its end or the limit; 'ok', 'failed (exit status)' or 'out of time'."""
    environment = os.environ | {'PYTHONUNBUFFERED': '1', 'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'}
    with log.open('w') as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            return 'ok' if status == 0 else f'failed ({status})'
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return 'out of time'


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks all', description=__doc__.splitlines()[0])
    parser.add_argument('--output_dir', type=Path, required=True)
    parser.add_argument('--device', default='cuda', choices=('cpu', 'cuda'))
    parser.add_argument('--steps', nargs='+', choices=[step.name for step in STEPS], help='only these')
    parser.add_argument('--limit', type=float, help='time limit of each step in seconds')
    parser.add_argument('--workers', type=int, default=max(1, (os.cpu_count() or 1) - 2), help='processes of the tests')
    parser.add_argument('--tiny', action='store_true', help='run very little of each step')
    options = parser.parse_args(args)
    output = options.output_dir.resolve()
    output.mkdir(parents=True, exist_ok=True)
    # a process started in the background ignores interrupts, and so would its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    values = {
        'device': options.device, 'device_name': device_name(options.device), 'out': output, 'workers': options.workers,
    }
    summary = {}
    for step in STEPS:
        if options.steps and step.name not in options.steps:
            continue
        log, started = output / f'{step.name}.log', time.perf_counter()
        state = run_step(step.arguments(options.tiny, **values), log, options.limit or step.limit)
        lines = log.read_text(errors='replace').split('\n')
        summary[step.name] = {
            'state': state, 'seconds': round(time.perf_counter() - started, 1),
            'last_line': next((line for line in reversed(lines) if line.strip()), ''),
        }
        print(f'{step.name}: {state}, {summary[step.name]["seconds"]} s', flush=True)
        (output / 'summary.json').write_text(json.dumps(summary, indent=1) + '\n')
    print()
    for name, row in summary.items():
        print(f'{name:12}{row["state"]:16}{row["seconds"]:8.1f} s   {row["last_line"][:100]}')
    return int(any(row['state'] != 'ok' for row in summary.values()))
