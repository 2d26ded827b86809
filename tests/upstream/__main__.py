"""`python -m tests.upstream DIR`: a tree of fla with Longhorn in it, and `DIR/longhorn.patch`. Nothing is sent anywhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.upstream.tree import write_patch


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m tests.upstream', description=__doc__)
    parser.add_argument('folder', metavar='DIR', type=Path, help='new, or a tree of fla without changes')
    parser.add_argument('--installed', action='store_true', help="the installed fla in place of the package index's")
    options = parser.parse_args()
    report = write_patch(options.folder, installed=options.installed)
    print(f'{options.folder / "longhorn.patch"}: {report.patch}')
    print(f'{report.files} new files; {report.imports} lines of imports renamed')
    show('lines of docstrings and messages in which a name changed', report.others)
    show('lines that name the plugin', report.named)


def show(title: str, lines: list[tuple[str, str]]) -> None:
    print(f'{len(lines)} {title}')
    for path, line in lines:
        print(f'  {path}: {line}')


if __name__ == '__main__':
    main()
