"""`python -m benchmarks decoding`: the kernels of one decoded token, and that none came back that had gone."""

from __future__ import annotations

import json

import pytest

from tests import forks

# of a layer: norm, four projections, convolution, update with D and gate, residual; and embedding, last norm, head
LAYER = {'layer_norm_fwd_kernel_row': 1, 'mm': 3, 'addmm': 1, 'causal_conv1d_update_kernel': 1, 'add': 1}
ENDS = {'embedding': 1, 'layer_norm_fwd_kernel_row': 1, 'mm': 1}
UPDATES = {'Longhorn': 'longhorn_step_kernel', 'Longhorn exact': 'fused_recurrent_longhorn_exact_fwd_kernel'}


@pytest.fixture(scope='module')
def kernels(tmp_path_factory) -> dict[str, dict[str, int]]:
    """From a process that has no interpreter for its kernels."""
    file = tmp_path_factory.mktemp('decoding') / 'decoding.json'
    forks.output('-m', 'benchmarks', 'decoding', '--layers', 3, '--json', file)
    return json.loads(file.read_text())['kernels']


@pytest.mark.parametrize('name', list(UPDATES))
def test_eight_kernels_a_layer(kernels, name):
    layer = LAYER | {UPDATES[name]: 1}
    assert sum(layer.values()) == 8
    assert kernels[name] == {kernel: 3 * layer.get(kernel, 0) + ENDS.get(kernel, 0) for kernel in layer | ENDS}
