"""fla's own models compute the same, and fail with the same errors, whether the plugin is imported or not."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import forks


def compare(device, **env: str) -> dict:
    """What :mod:`tests.integration.scripts.native` finds, which must be the same with the plugin and without."""
    def run(*plugin: str) -> dict:
        return json.loads(forks.output(forks.SCRIPTS / 'native.py', device, *plugin, env=env, fla=False).splitlines()[-1])

    with ThreadPoolExecutor() as pool:
        both = pool.submit(run), pool.submit(run, 'plugin')
    without, with_plugin = (x.result() for x in both)
    assert {name: x for name, x in with_plugin.items() if x != without[name]} == {}
    return without


def failed(results: dict) -> set[str]:
    return {name for name, x in results.items() if isinstance(x, str) and 'Error: ' in x}


WITH_ATTENTION = {'attention', 'hybrid', 'Transformer'}


@pytest.mark.slow
def test_same_numbers(device):
    """Bit for bit on a device; on the CPU in Triton's interpreter, with fla's kernels and not `fla_cpu` in their place."""
    results = compare(device, **({'TRITON_INTERPRET': '1', 'FLA_CPU': '0'} if device.type == 'cpu' else {}))
    assert failed(results) <= WITH_ATTENTION


@pytest.mark.slow
def test_same_errors(device):
    """As it comes: without a GPU, what needs one still says so."""
    results = compare(device)
    built = {x for x in results if x.startswith('initial')}
    assert device.type != 'cpu' or failed(results) == results.keys() - {'weight decay'} - built
