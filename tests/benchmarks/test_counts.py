"""What `python -m benchmarks` counts without a GPU, in processes that have no interpreter for their kernels."""

import json

from tests import forks

# of a layer: norm, four projections, convolution, update with D and gate, residual; and embedding, last norm, head
LAYER = {'layer_norm_fwd_kernel_row': 1, 'mm': 3, 'addmm': 1, 'causal_conv1d_update_kernel': 1, 'add': 1}
ENDS = {'embedding': 1, 'layer_norm_fwd_kernel_row': 1, 'mm': 1}
UPDATES = {'Longhorn': 'longhorn_step_kernel', 'Longhorn exact': 'fused_recurrent_longhorn_exact_fwd_kernel'}


def test_eight_kernels_a_layer(tmp_path):
    """Those of one decoded token."""
    forks.output('-m', 'benchmarks', 'decoding', '--layers', 3, '--json', tmp_path / 'decoding.json')
    kernels = json.loads((tmp_path / 'decoding.json').read_text())['kernels']
    for name, update in UPDATES.items():
        layer = LAYER | {update: 1}
        assert sum(layer.values()) == 8
        assert kernels[name] == {kernel: 3 * layer.get(kernel, 0) + ENDS.get(kernel, 0) for kernel in layer | ENDS}
