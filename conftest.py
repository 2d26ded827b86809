"""Options and fixtures of all tests, those of the packages and of the laboratory too."""

import os
import shutil
import sys
import time
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import plain_fla
from tests.devices import INTERPRETING, hasten_interpreter, why_not

# a package has Numba's
BACKENDS = ['numba', 'torch'] if find_spec('fla_longhorn_cpu') else ['torch']

if INTERPRETING:
    # what compiles kernels, which the interpreter cannot, and what runs or checks before them
    collect_ignore_glob = [f'packages/offgpu/tests/{folder}/test_*.py' for folder in ('kernels', 'ptx')]
    # and what runs in programs of its own
    collect_ignore_glob += ['tests/ops/context_parallel/test_op.py'] + [
        f'tests/ops/test_{name}.py'
        for name in ('errors', 'last_read', 'naive', 'naive_chunk', 'plain', 'pool_errors', 'transforms')
    ]


class Limit:
    """Ends a run after `--seconds` with its report, which an interrupt from outside can lose."""

    def __init__(self, seconds):
        self.seconds, self.end = seconds, time.monotonic() + seconds

    def pytest_sessionstart(self, session):
        self.session = session

    def pytest_runtest_logreport(self, report):
        if time.monotonic() > self.end:
            self.session.shouldstop = f'stopped after {self.seconds:.0f} s'


def pytest_addoption(parser):
    parser.addoption('--device', default='cpu', help='where the tests run: cpu or cuda')
    parser.addoption('--seconds', type=float, help='after so many, end with those tests that have begun')


def pytest_configure(config):
    # seconds, which pytest-xdist's controller does without: it runs no test
    if hasattr(config, 'workerinput') or not config.getoption('numprocesses', None):
        import fla_longhorn  # noqa: F401  registers

        plain_fla.install()
        if INTERPRETING:
            hasten_interpreter()
    # the same draws in every run, and no deadline: compiling and interpreting take as long as they take
    examples = 2 if INTERPRETING else 20 if config.getoption('--device') == 'cpu' else 8
    settings.register_profile(
        'suite', deadline=None, derandomize=True, max_examples=examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    settings.load_profile('suite')
    if config.getoption('--seconds'):
        # in each worker of pytest-xdist too, which ends the whole run when it ends
        config.pluginmanager.register(Limit(config.getoption('--seconds')))
    # what is compared with a kernel's float32 must not be rounded to TF32, as cuDNN's convolutions are by default
    torch.backends.cudnn.allow_tf32 = False


def pytest_generate_tests(metafunc):
    """A test of the `backend` fixture runs once with each backend that serves its device."""
    if 'backend' in metafunc.fixturenames:
        on_triton = INTERPRETING or metafunc.config.getoption('--device') != 'cpu'
        metafunc.parametrize('backend', ['triton'] if on_triton else BACKENDS, indirect=True)


def pytest_collection_modifyitems(config, items):
    if config.getoption('--device') == 'cpu' and not plain_fla.HAS_PACKAGE:
        of_fla = [item for item in items if item.get_closest_marker('fla_kernels')]
        items[:] = [item for item in items if item not in of_fla]
        config.hook.pytest_deselected(items=of_fla)
    # in CI a machine that lacks something fails the tests that need it
    if 'CI' not in os.environ and not (shutil.which('gcc') and shutil.which('g++')):
        for item in items:
            if item.get_closest_marker('compiler'):
                item.add_marker(pytest.mark.skip(reason='needs gcc and g++, which are not on the PATH'))
    if config.getoption('--device') != 'cpu':
        for item in items:
            if why := why_not(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f'not on this device: {why}'))


@pytest.fixture
def backend(request, monkeypatch) -> str:
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', request.param)
    monkeypatch.setenv('FLA_CPU_LOOPS', '0' if request.param == 'torch' else '1')
    return request.param


@pytest.fixture(params=[False, True], ids=['diagonal', 'exact'])
def exact(request) -> bool:
    """The update."""
    return request.param


@pytest.fixture(autouse=True)
def forget_environment():
    """Variables that are read once are read again by the next test, and after it."""
    forget()
    yield
    forget()


def forget() -> None:
    for name, function in (('fla_cpu.backend', 'import_loops'), ('fla_longhorn.ops.backends', 'backend_name')):
        if name in sys.modules:
            getattr(sys.modules[name], function).cache_clear()


@pytest.fixture(scope='session')
def device(request) -> torch.device:
    return torch.device(request.config.getoption('--device'))


@pytest.fixture
def default_device(device):
    """`device`, where PyTorch makes the tensors of code that names none; on the CPU nothing is set."""
    if device.type != 'cpu':
        torch.set_default_device(device)
    yield device
    if device.type != 'cpu':
        torch.set_default_device(None)


@pytest.fixture
def triton_device() -> torch.device:
    """Where Triton's kernels run, whatever `--device` says: under the interpreter on the CPU, else on a GPU."""
    # seconds, as above
    from tests.ops.cases import TRITON_DEVICE

    return torch.device(TRITON_DEVICE or 'cuda')


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poison():
    """Fill what `torch.empty` and its kin return with NaN, so that an element that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
