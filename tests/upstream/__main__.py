"""`python -m tests.upstream DIR`: a tree of fla with Longhorn in it, and its patches, `DIR/longhorn-1.patch` and so on.

The first has the exact form alone; the last ones make it the plugin's whole core. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.upstream.tree import write_patches


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m tests.upstream', description=__doc__)
    parser.add_argument('folder', metavar='DIR', type=Path, help='new, or a tree of fla without changes')
    parser.add_argument('--installed', action='store_true', help="the installed fla in place of the package index's")
    parser.add_argument('--first', action='store_true', help='the first patch alone')
    options = parser.parse_args()
    reports = write_patches(options.folder, installed=options.installed, pieces=1 if options.first else None)
    for report in reports:
        print(f'{options.folder / report.patch}, {report.name}: {report.changes}')
        if report.missing:
            show("lines of fla's lists before which Longhorn has its place were not found", report.missing)
    last = reports[-1]
    print(f'{last.lines} lines of Longhorn without tests; {last.imports} lines of imports renamed')
    show('other lines in which a name changed', last.others)


def show(title: str, lines: list[tuple[str, str]]) -> None:
    print(f'{len(lines)} {title}')
    for path, line in lines:
        print(f'  {path}: {line}')


if __name__ == '__main__':
    main()
