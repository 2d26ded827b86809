"""The compiled loops on several threads: bit-equal to one, in a forked child too; a failure of any is the call's."""

import multiprocessing
import threading

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.ops import numba as backend
from tests.ops.cases import Case, assert_close, make_inputs, make_options, reference, run

# eight heads, so that blocks are left for a worker whichever their width; several blocks of channels in each
CASE = Case(B=2, T=48, H=4, K=8, V=80, sigmoid=True, D=True, z=True, initial_state=True)
CASES = [CASE, Case(H=2, K=8, V=150, scalar_beta=True, initial_state=True).packed(30, 0, 41)]

@pytest.fixture(params=[False, True], ids=['diagonal', 'exact'])
def exact(request):
    return request.param


@pytest.fixture
def launches(monkeypatch):
    """(loop, worker, workers) of all that runs, in order, with threads for any size."""
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'numba')
    monkeypatch.setattr(backend, 'MIN_PARALLEL_UPDATES', 0)
    ran, launch = [], backend.launch
    monkeypatch.setattr(backend, 'launch', lambda loop, *args: launch(noted(loop, ran), *args))
    return ran


class noted:
    """A loop that says when it runs."""

    def __init__(self, function, ran):
        self.function, self.ran = function, ran

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, i_w, n_w, *args):
        self.ran.append((self.function.py_func.__name__, i_w, n_w))
        return self.function(i_w, n_w, *args)


ON_ONE = [('backward', 0, 1), ('forward', 0, 1)]
ON_TWO = [('backward', 0, 2), ('backward', 1, 2), ('forward', 0, 2), ('forward', 1, 2)]


@pytest.fixture
def threads(monkeypatch):
    """Sets how many threads torch is said to use; it uses one, for its own don't survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda n: monkeypatch.setattr(torch, 'get_num_threads', lambda: n)
    torch.set_num_threads(before)


@pytest.mark.parametrize('case', CASES, ids=str)
def test_two_threads_equal_one(case, exact, launches, threads):
    inputs, options = make_inputs(case), make_options(case, exact=exact)
    threads(1)
    expected = run(chunk_longhorn, inputs, options)
    assert sorted(launches) == ON_ONE
    assert_close(expected, reference(inputs, options), case.dtype)
    launches.clear()
    threads(2)
    # what a worker leaves out would be what the run before left in memory
    poison = [torch.full_like(x, float('nan')) for x in expected.values()]
    del poison
    got = run(chunk_longhorn, inputs, options)
    assert sorted(launches) == ON_TWO
    assert all(torch.equal(got[name], x) for name, x in expected.items())


def child(connection, launches):
    launches.clear()
    got = run(chunk_longhorn, make_inputs(CASE), make_options(CASE))
    connection.send((launches, {name: x.tolist() for name, x in got.items()}))


def test_a_forked_child_has_threads_of_its_own(launches, threads):
    """A parent's don't survive a fork: a child that waited for them would wait for ever."""
    run(chunk_longhorn, make_inputs(CASE), make_options(CASE))
    threads(2)
    launches.clear()
    expected = run(chunk_longhorn, make_inputs(CASE), make_options(CASE))
    assert sorted(launches) == ON_TWO
    context = multiprocessing.get_context('fork')
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, launches))
    process.start()
    answer = here.recv() if here.poll(60) else None
    process.kill()
    process.join()
    assert answer is not None, 'the child hangs'
    ran, got = answer
    assert sorted(ran) == ON_TWO
    assert all(torch.equal(torch.tensor(got[name]), x) for name, x in expected.items())


@pytest.mark.parametrize('failing', range(3))
def test_a_failure_is_raised_after_all_have_ended(failing):
    ended, last = [], threading.Event()

    def loop(i_w, n_w):
        if i_w == failing:
            raise MemoryError(f'{i_w} of {n_w}')
        last.wait(0.05)
        ended.append(i_w)

    with pytest.raises(MemoryError, match=f'{failing} of 3'):
        backend.threads.run(loop, 3)
    assert sorted(ended) == [i for i in range(3) if i != failing]
