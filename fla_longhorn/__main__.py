"""Run a program with the plugin imported: `python -m fla_longhorn script.py args...` or `... -m module args...`."""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import os
import runpy
import sys

USAGE = """\
usage: python -m fla_longhorn [--with HOST] SCRIPT [ARGS...]       runs it as `python SCRIPT [ARGS...]` does
       python -m fla_longhorn [--with HOST] -m MODULE [ARGS...]    runs it as `python -m MODULE [ARGS...]` does
       python -m fla_longhorn.selfcheck [--help]     compares the ops on this machine with the float64 reference

The program finds Longhorn in fla.ops, fla.layers, fla.models and transformers' Auto classes without importing fla_longhorn.
`--with timm` imports fla_longhorn.contrib.timm, for programs that create timm's models by name.
Under a launcher, the runner comes after it: torchrun -m fla_longhorn -m my.train
"""


class Imported(str):
    """The name of a module, which unpickling imports."""

    def __reduce__(self):
        return importlib.import_module, (str(self),)


def main(args: list[str]) -> None:
    """Run the program in `args`; the exit status is the program's, or 2 for a wrong command line."""
    modules = ['fla_longhorn']
    if args[:1] in (['-h'], ['--help']):
        print(USAGE, end='')
        return
    if args[:1] == ['--with']:
        modules, args = [import_host(args[1:2])], args[2:]
    if not args:
        fail('a script or -m MODULE is missing')
    import_in_children(modules)
    if args[0] == '-m':
        if len(args) < 2:
            fail('-m needs the name of a module')
        sys.argv[:] = args[1:]
        runpy.run_module(args[1], run_name='__main__', alter_sys=True)
    elif args[0].startswith('-'):
        fail(f'unknown option {args[0]}; options of Python itself come before -m fla_longhorn')
    else:
        run_script(args)


def run_script(args: list[str]) -> None:
    """Run a source file, or a folder or zip archive with a `__main__.py`, which runpy adds to the search path itself."""
    path = os.path.join(os.getcwd(), args[0])
    if not os.path.exists(path):
        fail(f"can't open file {path!r}")
    sys.argv[:] = args
    if not sys.flags.safe_path:
        # the working directory, which `-m fla_longhorn` added
        del sys.path[0]
        if path.endswith('.py'):
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    runpy.run_path(path, run_name='__main__')


def import_host(names: list[str]) -> str:
    name = f'fla_longhorn.contrib.{"".join(names)}'
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        fail(f'--with takes the name of a module of fla_longhorn.contrib, got {" ".join(names) or "none"}')
    return name


def import_in_children(modules: list[str]) -> None:
    """Let processes that `multiprocessing` spawns import these before they import the program.

    A program that imports `fla.layers.Longhorn` fails in them otherwise, and its pool starts new ones without end.
    """
    prepare = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: {'plugin': [Imported(x) for x in modules], **prepare(name)}


def fail(message: str) -> None:
    print(f'{USAGE}\npython -m fla_longhorn: error: {message}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
    main(sys.argv[1:])
