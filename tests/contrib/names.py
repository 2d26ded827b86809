"""What this package imports of a server that it is a plugin of."""

import ast

from tests import forks


def imported(server: str) -> list[tuple[str, str]]:
    """Module and name of each import from `server` by its plugin and its entry point."""
    paths = [forks.ROOT / f'fla_longhorn_plugins/{server}.py', *(forks.ROOT / 'fla_longhorn/contrib' / server).glob('*.py')]
    return sorted({
        (node.module, name.name) for path in paths for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith(server) for name in node.names
    })
