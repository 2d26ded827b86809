"""Print the folder of the tasks, or a run's results beside the paper's.

    python -m fla_longhorn_extras.lm_eval                   the folder for lm_eval's --include_path
    python -m fla_longhorn_extras.lm_eval results_*.json    lm_eval's results in the paper's tables
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fla_longhorn_extras.lm_eval import TASKS
from fla_longhorn_extras.lm_eval.tables import markdown


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m fla_longhorn_extras.lm_eval', description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('results', type=Path, nargs='*', help='JSON files that lm_eval wrote for one model')
    options = parser.parse_args(args)
    if not options.results:
        print(TASKS)
        return
    results: dict[str, dict] = {}
    for path in options.results:
        results |= json.loads(path.read_text())['results']
    print(markdown(results))


if __name__ == '__main__':
    main()
