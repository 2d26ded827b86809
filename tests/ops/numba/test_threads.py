"""The threaded path of the compiled loops: bit-equal to one thread, and left alone in a forked child."""

import multiprocessing

import numba
import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.ops import numba as backend
from tests.ops.cases import Case, assert_close, make_inputs, make_options, reference, run

# eight heads, so that blocks are left for a worker whichever their width; several blocks of channels in each
CASE = Case(B=2, T=48, H=4, K=8, V=80, sigmoid=True, D=True, z=True, initial_state=True)
CASES = [CASE, Case(H=2, K=8, V=150, scalar_beta=True, initial_state=True).packed(30, 0, 41)]

pytestmark = [
    pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason='one core'),
    # Numba starts its threads once a process
    pytest.mark.xdist_group('numba-threads'),
]


@pytest.fixture(params=[False, True], ids=['diagonal', 'exact'])
def exact(request):
    return request.param


@pytest.fixture
def launches(monkeypatch):
    """Names of the loops that run, with threads for any size."""
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'numba')
    monkeypatch.setattr(backend, 'MIN_PARALLEL_UPDATES', 0)
    ran, launch = [], backend.launch

    def recorded(serial, parallel, *args):
        launch(noted(serial, ran), noted(parallel, ran), *args)

    monkeypatch.setattr(backend, 'launch', recorded)
    return ran


class noted:
    """A loop that says when it runs."""

    def __init__(self, function, ran):
        self.function, self.ran = function, ran

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, *args):
        self.ran.append(self.function.py_func.__name__)
        return self.function(*args)


@pytest.fixture
def threads(monkeypatch):
    """Sets how many threads torch is said to use; it uses one, for its own don't survive a fork either."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda n: monkeypatch.setattr(torch, 'get_num_threads', lambda: n)
    torch.set_num_threads(before)


@pytest.mark.parametrize('case', CASES, ids=str)
def test_two_threads_equal_one(case, exact, launches, threads):
    inputs, options = make_inputs(case), make_options(case, exact=exact)
    threads(1)
    expected = run(chunk_longhorn, inputs, options)
    assert launches == ['forward', 'backward']
    assert_close(expected, reference(inputs, options), case.dtype)
    launches.clear()
    threads(2)
    # what a worker leaves out would be what the run before left in memory
    poison = [torch.full_like(x, float('nan')) for x in expected.values()]
    del poison
    got = run(chunk_longhorn, inputs, options)
    assert launches == ['forward_parallel', 'backward_parallel']
    assert all(torch.equal(got[name], x) for name, x in expected.items())


def child(connection, launches):
    launches.clear()
    got = run(chunk_longhorn, make_inputs(CASE), make_options(CASE))
    connection.send((launches, {name: x.tolist() for name, x in got.items()}))


def test_a_forked_child_runs_on_its_own_thread(launches, threads):
    """Numba's threads don't survive a fork: a child that asked them to work would wait for ever."""
    threads(2)
    expected = run(chunk_longhorn, make_inputs(CASE), make_options(CASE))
    assert 'forward_parallel' in launches
    context = multiprocessing.get_context('fork')
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, launches))
    process.start()
    answer = here.recv() if here.poll(60) else None
    process.kill()
    process.join()
    assert answer is not None, 'the child hangs'
    ran, got = answer
    assert ran == ['forward', 'backward']
    assert all(torch.equal(torch.tensor(got[name]), x) for name, x in expected.items())
