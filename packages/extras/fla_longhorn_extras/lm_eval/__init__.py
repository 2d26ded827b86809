"""The paper's and the reviews' downstream evaluations as tasks of lm_eval: a folder for its `--include_path`.

    lm_eval run --include_path "$(python -m fla_longhorn_extras.lm_eval)" --tasks longhorn_table2 longhorn_recall ...

`longhorn_table2` has the eight tasks of the paper's Table 2, `longhorn_recall` the reviews' recall suite (FDA, SWDE, NQ,
SQuAD, TriviaQA, DROP), and `longhorn_recall_twice` the same with each text read twice.
"""

from pathlib import Path

TASKS = Path(__file__).parent / 'tasks'
