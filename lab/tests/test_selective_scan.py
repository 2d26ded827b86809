"""The compiled scan against transformers' loop, in float64."""

import torch
from transformers.models.mamba import modeling_mamba

from lab.experiments import selective_scan

loop = modeling_mamba.mamba_selective_scan


def test_outputs_and_gradients():
    """Of every argument; rows are more than are taken at once."""
    torch.manual_seed(0)
    rows, D, N, T = selective_scan.ROWS + 3, 5, 4, 9
    inputs = {
        'hidden_states': torch.randn(rows, D, T), 'dt': torch.randn(rows, D, T), 'A': -torch.rand(D, N) * 4,
        'B': torch.randn(rows, N, T), 'C': torch.randn(rows, N, T), 'D': torch.randn(D), 'z': torch.randn(rows, D, T),
        'delta_bias': torch.randn(D),
    }
    results = []
    for scan in (loop, selective_scan.mamba_selective_scan):
        leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
        y = scan(**leaves, delta_softplus=True)
        # transformers' loop computes a part in float32
        y.square().sum().backward()
        results.append({'y': y, **{name: x.grad for name, x in leaves.items()}})
    for name, wanted in results[0].items():
        torch.testing.assert_close(results[1][name], wanted, rtol=1e-4, atol=1e-5, msg=name)
