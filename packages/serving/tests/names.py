"""What this package imports of a server that it is a plugin of."""

import ast

from tests import forks


def imported(server: str) -> list[tuple[str, str]]:
    """Module and name of each import from `server` by its plugin and its entry point."""
    package = forks.ROOT / 'packages/serving/fla_longhorn_serving'
    paths = [package / f'{server}_plugin.py', *(package / server).glob('*.py')]
    return sorted({
        (node.module, name.name) for path in paths for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith(server) for name in node.names
    })
