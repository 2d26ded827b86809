"""A process that has imported what takes long, and forks a child for each program: `python server.py MODULE ...`.

A script of its own, so that nothing of the tests or of the package is imported in it. It reads requests from its input,
`{"arguments": ..., "folder": ..., "env": ..., "output": file, "errors": file, "limit": seconds}`, runs `python *arguments`
as a child and answers with its exit status; -1 where the child was stopped at the limit.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import types
import warnings


def prepare(request: dict) -> None:
    """Files, folder and environment of the child."""
    os.setpgrp()
    os.chdir(request['folder'])
    os.environ.clear()
    os.environ.update(request['env'])
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY), *((i, request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                                        for i, name in ((1, 'output'), (2, 'errors'))),
    ):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    added = [x for x in os.environ.get('PYTHONPATH', '').split(os.pathsep) if x]
    sys.path[:] = [*added, *(x for x in sys.path if x not in added)]


def execute(first: str, *arguments: str) -> None:
    """What `python first *arguments` runs: code, a module or a script."""
    if first == '-c':
        sys.argv = ['-c', *arguments[1:]]
        sys.path.insert(0, '')
        sys.modules['__main__'] = types.ModuleType('__main__')
        exec(compile(arguments[0], '<string>', 'exec'), vars(sys.modules['__main__']))
    elif first == '-m':
        sys.argv = list(arguments)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name='__main__', alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name='__main__')


def status_of(request: dict) -> int:
    """The status of the program, which has ended with all that it began but has not been taken apart: that takes a second."""
    status = 0
    try:
        prepare(request)
        execute(*request['arguments'])
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


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


def main(preloaded: list[str]) -> None:
    # not the folder of this script
    del sys.path[0]
    with warnings.catch_warnings():
        # what they say of this machine is said again in the tests
        warnings.simplefilter('ignore')
        for name in preloaded:
            importlib.import_module(name)
    imported = [name for name in sys.modules if name.partition('.')[0] in ('fla_longhorn', 'tests', 'numba')]
    if imported:
        raise RuntimeError(f'{imported} must be imported by the children alone')
    # children don't look through what is there already for what can be freed, which would copy it
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(status_of(request))
        print(json.dumps(wait(pid, request['limit'])), flush=True)
    os._exit(0)


if __name__ == '__main__':
    main(sys.argv[1:])
