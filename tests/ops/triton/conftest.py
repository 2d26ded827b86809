"""Where Triton's kernels neither run nor are interpreted, what calls nothing else is not collected."""

import torch

from tests.conftest import INTERPRETING

collect_ignore = [] if INTERPRETING or torch.cuda.is_available() else ['test_tune.py']
