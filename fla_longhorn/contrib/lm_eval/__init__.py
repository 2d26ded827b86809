"""The paper's and the reviewers' downstream evaluations as tasks of lm_eval: a folder for its `--include_path`.

    lm_eval run --include_path "$(python -m fla_longhorn.contrib.lm_eval)" --tasks longhorn_table2 longhorn_recall ...

`longhorn_table2` is the eight tasks of the paper's Table 2. `longhorn_recall` is the recall suite of the reviews (FDA, SWDE,
NQ, SQuAD, TriviaQA, DROP), `longhorn_recall_twice` the same with each text read twice.
"""

from pathlib import Path

TASKS = Path(__file__).parent / 'tasks'
