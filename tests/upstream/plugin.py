"""`pytest -p tests.upstream.plugin`: fla's tests in Triton's interpreter on the CPU, which fla takes for a GPU."""

import fla.utils
import torch
from triton.runtime.autotuner import Autotuner

from tests.devices import hasten_interpreter


def run_first(self, *args, **kwargs):
    """A launch with the first configuration: choosing one takes a GPU."""
    return self.fn.run(*args, **{**kwargs, **self.configs[0].kwargs})


hasten_interpreter()
fla.utils.device = 'cpu'
Autotuner.run = run_first
torch.set_num_threads(1)
