"""Run calls of the operators as PTX and print a line for each: an hour when Triton's cache is empty.

    python -m packages.offgpu.tests.ptx [--groups diagonal exact ...] [--match text] [--tokens 1 16 70]
        [--target sm_80] [--order last]

Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace

from offgpu.emulator.launch import EMULATED
from offgpu.emulator.machine import ORDERS
from packages.offgpu.tests.ptx.calls import GROUPS
from packages.offgpu.tests.ptx.execute import run_call


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m packages.offgpu.tests.ptx', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--groups', nargs='+', choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument('--match', default='', help='only calls with this in their line')
    parser.add_argument('--tokens', nargs='+', type=int, help='in place of those of calls with dense rows, which run alone')
    parser.add_argument('--target', choices=EMULATED, help='in place of that of the calls')
    parser.add_argument('--order', choices=ORDERS, default='together', help='in which warps run')
    parser.add_argument('--no-races', action='store_true', help='without racecheck')
    parser.add_argument('--assemble', action='store_true', help='have ptxas make machine code too')
    options = parser.parse_args()
    warnings.simplefilter('ignore')
    calls = [call for group in options.groups for call in GROUPS[group]()]
    if options.tokens:
        calls = [x.with_tokens(T) for x in calls if x.case.lengths is None and x.op != 'step' for T in options.tokens]
    bad = 0
    for call in calls:
        call = replace(call, target=options.target or call.target)
        if options.match in str(call):
            try:
                line = 'ok      ' + run_call(call, options.order, races=not options.no_races, assemble=options.assemble)
            except Exception as error:
                line, bad = f'FAILED  {call}: {type(error).__name__}: {error}', bad + 1
            print(line, flush=True)
    return int(bad > 0)


if __name__ == '__main__':
    raise SystemExit(main())
