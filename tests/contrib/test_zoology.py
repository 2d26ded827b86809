"""The layer as a mixer in somebody else's model."""

import pytest

from tests.integration.process import ROOT, SCRIPTS, run


@pytest.mark.slow
def test_bare_mixer_learns(device):
    out = run('-m', 'fla_longhorn', SCRIPTS / 'train_mixer.py', device, cwd=ROOT)
    lines = [tuple(map(float, line.split())) for line in out.splitlines()]
    assert len(lines) == 2
    for first, last in lines:
        assert last < 0.75 * first
