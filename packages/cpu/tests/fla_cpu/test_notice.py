"""The first call of a loop says so where it takes long, and no other call does."""

import threading
import time

import pytest

from fla_kit.numba import notice


class Loop:
    """What Numba's dispatcher shows: no overloads before the first call, which compiles for so many seconds."""

    def __init__(self, seconds):
        self.overloads, self.seconds = [], seconds

    def __call__(self, x):
        if x is None:
            raise ValueError('no argument')
        if not self.overloads:
            time.sleep(self.seconds)
            self.overloads.append('int64')
        return x + 1


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(notice, 'PATIENCE', 0.05)
    monkeypatch.setattr(notice, '_told', threading.Event())


def test_told_once(capsys):
    loop = Loop(0.5)
    assert notice.call(loop, 1) == notice.call(loop, 1) == 2
    assert notice.call(Loop(0.5), 1) == 2
    assert capsys.readouterr().err.count('fla_cpu: Numba compiles') == 1


def test_quiet_where_it_is_quick(capsys):
    assert notice.call(Loop(0), 1) == 2
    with pytest.raises(ValueError, match='no argument'):
        notice.call(Loop(0), None)
    time.sleep(0.3)
    assert capsys.readouterr().err == ''
