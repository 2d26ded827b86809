"""`pytest -p offgpu.pretend.plugin`: tests with the pretend device, also in workers and child processes.

PRETEND_TEST_SECONDS limits the time of each test: a spin loop in an interpreted kernel can take hours.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from offgpu.pretend.install import activate, with_site

SECONDS = int(os.environ.get('PRETEND_TEST_SECONDS', '0'))


def keep_in_programs() -> None:
    """Child processes with an environment made by a test have the device too."""
    init: Any = subprocess.Popen.__init__

    def start(self, *args, env=None, **kwargs) -> None:
        if env is not None and env.get('PRETEND_CUDA') == '1':
            env = {**env, 'PYTHONPATH': with_site(env.get('PYTHONPATH', ''))}
        init(self, *args, env=env, **kwargs)

    setattr(subprocess.Popen, '__init__', start)  # noqa: B010


activate()
keep_in_programs()


class TooSlow(BaseException):
    """Not an `Exception`, so that the code under test does not catch it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    def stop(*_):
        raise TooSlow(f'{item.nodeid} took more than {SECONDS} s')

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return (yield)
    except TooSlow as slow:
        pytest.fail(str(slow))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
