"""The compiled loops on several threads: bit-equal to one, in a forked child too; a failure of any is the call's."""

import multiprocessing
import threading

import pytest
import torch

from fla_kit.numba import threads as pool
from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from tests.ops.cases import assert_close, reference, run

# eight heads, so that blocks are left for a worker whichever their width; several blocks of channels in each
CASE = Case(B=2, T=48, H=4, K=8, V=80, sigmoid=True, D=True, z=True, initial_state=True)
CASES = [
    CASE, Case(H=2, K=8, V=150, scalar_beta=True, initial_state=True).packed(30, 0, 41),
    Case(H=2, K=8, V=150, g='head', initial_state=True).packed(30, 0, 41),
]

@pytest.fixture
def shared(monkeypatch):
    """How many workers shared each loop that ran, with threads for any size."""
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'numba')
    monkeypatch.setattr('fla_kit.numba.launch.MIN_PARALLEL_STEPS', 0)
    counts, run_shared = [], pool.run
    monkeypatch.setattr(pool, 'run', lambda loop, n_w, *args: counts.append(n_w) or run_shared(loop, n_w, *args))
    return counts


@pytest.fixture
def threads(monkeypatch):
    """Sets how many threads torch is said to use; it uses one, for its own don't survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda n: monkeypatch.setattr(torch, 'get_num_threads', lambda: n)
    torch.set_num_threads(before)


@pytest.mark.parametrize('case', CASES, ids=str)
def test_two_threads_equal_one(case, exact, shared, threads):
    inputs, options = make_inputs(case), make_options(case, exact=exact)
    threads(1)
    expected = run(chunk_longhorn, inputs, options)
    assert not shared
    assert_close(expected, reference(inputs, options), case.dtype)
    shared.clear()
    threads(2)
    # what a worker leaves out would be what the run before left in memory
    poison = [torch.full_like(x, float('nan')) for x in expected.values()]
    del poison
    got = run(chunk_longhorn, inputs, options)
    assert shared == [2, 2]
    assert all(torch.equal(got[name], x) for name, x in expected.items())


def child(connection, shared):
    shared.clear()
    got = run(chunk_longhorn, make_inputs(CASE), make_options(CASE))
    connection.send((shared, {name: x.tolist() for name, x in got.items()}))


def test_a_forked_child_computes_the_same(shared, threads):
    """A parent's threads don't survive a fork: a child that waited for them would wait for ever."""
    run(chunk_longhorn, make_inputs(CASE), make_options(CASE))
    threads(2)
    shared.clear()
    expected = run(chunk_longhorn, make_inputs(CASE), make_options(CASE))
    assert shared == [2, 2]
    context = multiprocessing.get_context('fork')
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, shared))
    process.start()
    answer = here.recv() if here.poll(60) else None
    process.kill()
    process.join()
    assert answer is not None, 'the child hangs'
    ran, got = answer
    assert ran == [2, 2]
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
        pool.run(loop, 3)
    assert sorted(ended) == [i for i in range(3) if i != failing]


@pytest.fixture
def flushing():
    yield
    torch.set_flush_denormal(False)


def test_every_thread_flushes_denormals_as_the_caller_does(shared, threads, flushing):
    """`torch.set_flush_denormal` sets the calling thread alone."""
    inputs = {name: x.detach() for name, x in make_inputs(CASE).items()}
    del inputs['initial_state']
    # the outputs are below the normal numbers
    inputs['v'] *= 1e-39

    def count(n, flush):
        threads(n)
        torch.set_flush_denormal(flush)
        shared.clear()
        o, _ = chunk_longhorn(**inputs, use_beta_sigmoid_in_kernel=True)
        assert shared == [n] * (n > 1)
        return o.count_nonzero().item()

    count(2, False)
    assert count(1, True) == count(2, True) == 0
    assert count(1, False) == count(2, False) > 0
