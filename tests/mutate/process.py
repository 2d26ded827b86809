"""A process that has imported what the tests use of other packages, and forks a child for each run of pytest.

A script of its own, so that nothing of the tests or of the package is imported in it. It reads requests from its input,
`{"folder": ..., "arguments": ..., "env": ..., "limit": ..., "output": file}`, and answers with pytest's exit code; -1 where
the child was stopped at the limit.
"""

import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import warnings

PRELOADED = (
    'hypothesis', 'pytest', 'torch', 'torch._dynamo', 'torch._dynamo.testing', 'torch._inductor.config', 'transformers',
    'transformers.models.auto.modeling_auto', 'fla', 'fla.models', 'fla.layers', 'fla.ops',
)


def child(request: dict) -> int:
    output = os.open(request['output'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setpgrp()
    os.chdir(request['folder'])
    os.environ.update(request['env'])
    sys.path.insert(0, request['folder'])
    found = importlib.util.find_spec('fla_longhorn').origin
    if found != os.path.join(request['folder'], 'fla_longhorn', '__init__.py'):
        raise RuntimeError(f'tests would import {found} instead of the copy in {request["folder"]}')
    import pytest

    return pytest.main(request['arguments'])


def wait(pid: int, limit: float) -> int:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def main() -> None:
    # not the folder of this script
    del sys.path[0]
    with warnings.catch_warnings():
        # what they say of this machine is said again in the tests
        warnings.simplefilter('ignore')
        for name in PRELOADED:
            importlib.import_module(name)
    imported = [name for name in sys.modules if name.partition('.')[0] in ('fla_longhorn', 'tests', 'numba')]
    if imported:
        raise RuntimeError(f'{imported} must be imported by the children alone')
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 125
            try:
                code = int(child(request))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps(wait(pid, request['limit'])), flush=True)


if __name__ == '__main__':
    main()
