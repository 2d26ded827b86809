"""The needle picture's rows are tenths of the depth, its columns lengths, and what no sample shows stays empty."""

import json
import math

import numpy as np
import pytest

from lab.experiments import needle

# (length, depth, recall)
SAMPLES = [(1024, 0.02, 1.0), (1024, 0.07, 0.0), (1024, 1.0, 1.0), (4096, 0.31, 1.0)]


@pytest.fixture
def samples(tmp_path):
    path = tmp_path / 'samples_longhorn_niah_single_2_2026-01-01T00-00-00.000000.jsonl'
    rows = [{'doc': {'max_length': length, 'depth': depth}, str(length): recall} for length, depth, recall in SAMPLES]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def test_rows_are_depths(samples):
    (task, lengths), = needle.read([samples]).items()
    assert task == 'longhorn_niah_single_2' and list(lengths) == [1024, 4096]
    np.testing.assert_equal(needle.by_depth(lengths[1024]), [0.5, *[math.nan] * 8, 1])
    np.testing.assert_equal(needle.by_depth(lengths[4096]), [*[math.nan] * 3, 1, *[math.nan] * 6])


def test_command(samples, tmp_path, capsys):
    needle.main([str(samples), '--plot', str(tmp_path / 'needle.png')])
    assert capsys.readouterr().out == 'longhorn_niah_single_2  1,024: 66.7%  4,096: 100.0%\n'
    assert (tmp_path / 'needle.png').stat().st_size > 1000
