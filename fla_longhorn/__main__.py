"""Run a program with the plugin imported: `python -m fla_longhorn script.py args...` or `... -m module args...`.

Importing this package has registered everything by the time this module runs. What is left is to be invisible: the program
is `__main__`, with the arguments, the search path, the tracebacks and the exit status that `python` would give it.
"""

from __future__ import annotations

import atexit
import importlib
import io
import multiprocessing.spawn
import os
import pkgutil
import runpy
import signal
import sys
import threading
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import ModuleType, TracebackType
from typing import Any

USAGE = """\
usage: python -m fla_longhorn SCRIPT [ARGS...]       runs it as `python SCRIPT [ARGS...]` does
       python -m fla_longhorn -m MODULE [ARGS...]    runs it as `python -m MODULE [ARGS...]` does
       python -m fla_longhorn.selfcheck [--help]     compares the ops on this machine with the float64 reference

The program finds Longhorn in fla.ops, fla.layers, fla.models and transformers' Auto classes without importing fla_longhorn.
Under a launcher, the runner comes after it: torchrun -m fla_longhorn -m my.train
"""

# what `python -m` itself calls
run_as_main = vars(runpy)['_run_module_as_main']


class Plugin:
    """Unpickles as the imported package."""

    def __reduce__(self):
        return importlib.import_module, ('fla_longhorn',)


def main(args: list[str]) -> None:
    """Run the program that the command line names; its exit status is this process's, and 2 means a wrong command line."""
    if args[:1] in (['-h'], ['--help']):
        print(USAGE, end='')
        return
    if not args:
        fail('a script or -m MODULE is missing')
    if args[0] == '-m':
        if len(args) < 2:
            fail('-m needs the name of a module')
        run = run_module
    elif args[0].startswith('-'):
        fail(f'unknown option {args[0]}; options of Python itself come before -m fla_longhorn')
    else:
        run = run_script
    import_plugin_in_children()
    try:
        run(args[1:] if args[0] == '-m' else args)
    except SystemExit:
        raise
    except BaseException:
        hide_runner()
        raise


def run_module(args: list[str]) -> None:
    """As `python -m`, by the very function that serves it: `sys.path[0]` is the working directory already."""
    sys.argv[:] = ['-m', *args[1:]]
    new_main()
    run_as_main(args[0])


def run_script(args: list[str]) -> None:
    """As `python`: a source file, a compiled one, or a folder or zip archive with a `__main__.py`."""
    sys.argv[:] = args
    path = args[0]
    finder = pkgutil.get_importer(path)
    if finder is not None and (os.path.isdir(path) or not hasattr(finder, 'path')):
        set_search_path(os.path.join(os.getcwd(), path))
        new_main()
        run_as_main('__main__', alter_argv=False)
        return
    path = os.path.join(os.getcwd(), path)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    set_search_path(os.path.dirname(os.path.realpath(path)))
    code = pkgutil.read_code(io.BytesIO(source))
    loader = (SourceFileLoader if code is None else SourcelessFileLoader)('__main__', path)
    module = new_main()
    # what else a script's globals hold depends on the version, and this module's hold it too
    optional: dict[str, Any] = {'__annotations__': {}, '__cached__': None}
    present = {name: value for name, value in optional.items() if name in globals()}
    vars(module).update(present, __file__=path, __loader__=loader)
    exec(compile(source, path, 'exec', dont_inherit=True) if code is None else code, vars(module))


def new_main() -> ModuleType:
    """An empty `__main__`, to stay the process's own after the program has ended: for threads, `atexit` and pickles."""
    module = ModuleType('__main__')
    vars(module).update(__builtins__=importlib.import_module('builtins'))
    sys.modules['__main__'] = module
    return module


def set_search_path(folder: str) -> None:
    """Put the script's folder where `-m fla_longhorn` put the working directory, unless Python is told to put none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def import_plugin_in_children() -> None:
    """Have processes that `multiprocessing` spawns import the plugin first, before they import the program."""
    prepare = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: {'plugin': Plugin(), **prepare(name)}


def hide_runner() -> None:
    """Leave the frames above the program's out of the traceback that Python is about to print.

    For a module the two frames of runpy stay, which `python -m` prints as well.
    """
    hook = sys.excepthook

    def print_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename != __file__:
            traceback = traceback.tb_next
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        hook(kind, error.with_traceback(traceback), traceback)
        if os.name == 'posix' and issubclass(kind, KeyboardInterrupt):
            die_interrupted()

    sys.excepthook = print_exception


def die_interrupted() -> None:
    """Finish what Python finishes before it exits, then let SIGINT end the process, so that a shell's loop stops too."""
    vars(threading)['_shutdown']()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def fail(message: str) -> None:
    print(f'{USAGE}\npython -m fla_longhorn: error: {message}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
    main(sys.argv[1:])
