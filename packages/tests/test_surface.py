"""What the packages, the benchmarks and `pyproject.toml` beside the plugin's offer, as `packages/tests/surface.json` has it.

`python -m packages.tests.test_surface` writes it again.
"""

from pathlib import Path
from typing import Any

import benchmarks.__main__
from tests.test_surface import ROOT, compare, described_projects, exported, options, variables, write

RECORD = Path(__file__).parent / 'surface.json'


def surface() -> dict[str, Any]:
    return {
        'names': exported(['fla_cpu']),
        'variables': variables(ROOT.glob('packages/*/fla*')),
        **described_projects(sorted(ROOT.glob('packages/*/pyproject.toml'))),
        'commands': {
            'fla_longhorn_extras.onnx': options('fla_longhorn_extras.onnx'),
            'benchmarks': sorted(benchmarks.__main__.COMMANDS),
        },
    }


def test_surface_is_the_recorded_one():
    compare(surface(), RECORD)


if __name__ == '__main__':
    write(surface(), RECORD)
