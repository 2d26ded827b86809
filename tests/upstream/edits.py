"""`python -m tests.upstream.edits TREE [PARAMETER ...]`: wrong edits of `chunk_longhorn`, and which test of the patch fails.

Each edit is made in a tree that `python -m tests.upstream` has written, and reverted. `TRITON_INTERPRET=1` runs the tests on a
CPU.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

TESTS = 'tests/ops/test_longhorn.py'
CHUNK = 'fla/ops/longhorn/chunk.py'
FORWARD, BACKWARD = (f'fla/ops/longhorn/triton/exact/{name}.py' for name in ('forward', 'backward'))
# what a wrong edit makes of each parameter before the operator sees it, or of its gradient
PARAMETERS = {
    'q': ('q = k', 'q = q.detach()'),
    'k': ('k = q', 'k = k.detach()'),
    'v': ('v = 2 * v', 'v = v.detach()'),
    'beta': ('beta = beta.roll(1, 1)', 'beta = beta.detach()'),
    'scale': ('scale = None',),
    'initial_state': ('initial_state = None', 'initial_state = None if initial_state is None else initial_state.detach()'),
    'output_final_state': ('output_final_state = False', 'output_final_state = True'),
    'exact': ('exact = False', 'exact = True'),
    'D': ('D = None', 'D = None if D is None else D.detach()'),
    'z': ('z = None', 'z = None if z is None else z.detach()'),
    'use_beta_sigmoid_in_kernel': ('use_beta_sigmoid_in_kernel = False', 'use_beta_sigmoid_in_kernel = True'),
    'state_v_first': ('state_v_first = False',),
    'cu_seqlens': ('cu_seqlens = None', 'cu_seqlens = None if cu_seqlens is None else cu_seqlens[[0, -1]]'),
    'cu_seqlens_cpu': ('cu_seqlens_cpu = None',),
    'cp_context': ('cp_context = None',),
    'return_intermediate_states': ('return_intermediate_states = False',),
    'allow_neg_eigval': ('allow_neg_eigval = False',),
    'g': ('g = None', 'g = None if g is None else g.detach()'),
    # changes nothing but on a GPU
    'disable_recompute': (),
}
# lines of kernels that see T: the last chunk of a sequence is not computed
LAST_CHUNK = (
    (FORWARD, 'tl.minimum(i_s + INTERVAL, T_n), BT', 'tl.minimum(i_s + INTERVAL, T_n // BT * BT), BT'),
    (BACKWARD, 'NT = tl.cdiv(T_n, BT)', 'NT = tl.maximum(T_n // BT, 1)'),
)


# which tests to run, where `test_options` has none of the parameter's name
SELECTIONS = {
    **dict.fromkeys(('q', 'k', 'v', 'beta', 'initial_state', 'exact', 'T'), 'test_options and scale-chunk'),
    'output_final_state': '(test_options and scale-chunk) or test_cp_context_of_one_rank',
    'use_beta_sigmoid_in_kernel': 'test_options and (scale-chunk or use_beta_sigmoid_in_kernel-chunk)',
    'cu_seqlens': 'test_varlen',
    'cu_seqlens_cpu': 'test_host_copy_of_boundaries',
    'cp_context': 'test_cp_context_of_one_rank',
    'return_intermediate_states': 'test_intermediate_states',
    'g': 'test_options and g_per_head-chunk',
}


@contextmanager
def edited(path: Path, text: str) -> Iterator[None]:
    before = path.read_text(encoding='utf-8')
    path.write_text(text, encoding='utf-8')
    try:
        yield
    finally:
        path.write_text(before, encoding='utf-8')


def planted(text: str, statement: str) -> str:
    """The text of `chunk.py` with the statement behind its function's docstring."""
    function = next(x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == 'chunk_longhorn')
    lines = text.splitlines(keepends=True)
    lines.insert(function.body[0].end_lineno or 0, f'    {statement}\n')
    return ''.join(lines)


def find_edits(tree: Path) -> Iterator[tuple[str, str, Path, str]]:
    """Parameter, edit, and the file's path and text with it."""
    chunk = (tree / CHUNK).read_text(encoding='utf-8')
    for name, statements in PARAMETERS.items():
        for statement in statements:
            yield name, statement, tree / CHUNK, planted(chunk, statement)
    for file, old, new in LAST_CHUNK:
        text = (tree / file).read_text(encoding='utf-8')
        if text.count(old) != 1:
            raise SystemExit(f'{file} must have one {old!r}, which an edit replaces, got {text.count(old)}')
        yield 'T', new, tree / file, text.replace(old, new)


class FirstFailure:
    """A plugin of pytest that keeps the name of the test that failed."""

    name = ''

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid.partition('::')[2]


def run_tests(tree: str, selection: str, answer: Connection) -> None:
    """In a child, which has not imported fla yet: the first test that fails, as text that is empty if none does."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, tree)
    found = FirstFailure()
    options = ['-qqx', '--tb=no', '--no-summary', '-p', 'no:cacheprovider', '-p', 'tests.upstream.plugin', f'--rootdir={tree}']
    code = pytest.main([*options, '-k', selection, f'{tree}/{TESTS}'], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f'pytest ended with {code!r}')
    answer.send(found.name)


def notice(tree: Path, parameter: str) -> str:
    """The parameter's test that fails in the tree as it is, or nothing."""
    selection = SELECTIONS.get(parameter, f'test_options and {parameter}-chunk')
    context = get_context('fork')
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_tests, args=(str(tree), selection, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        child.join()
        code = child.exitcode or 0
        if code >= 0:
            raise SystemExit('the tests did not run') from error
        # a read behind the end of memory
        return f'ended by signal {-code}'
    finally:
        child.join()


def main() -> int:
    tree, chosen = Path(sys.argv[1]).resolve(), sys.argv[2:]
    # not fla, which each child imports with its edit
    for name in ('torch', 'transformers', 'einops', 'triton'):
        import_module(name)
    unnoticed = 0
    for parameter, edit, path, text in find_edits(tree):
        if chosen and parameter not in chosen:
            continue
        with edited(path, text):
            test = notice(tree, parameter)
        unnoticed += not test
        print(f'{parameter}: {edit}: {test or "NOT NOTICED"}', flush=True)
    return 1 if unnoticed else 0


if __name__ == '__main__':
    raise SystemExit(main())
