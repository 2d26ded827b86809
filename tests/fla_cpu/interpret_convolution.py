"""Run fla's causal convolution on the CPU through its Triton kernels, and save what it takes and returns.

A program: Triton reads `TRITON_INTERPRET` once. The autotuner needs a GPU to choose, so every kernel keeps one configuration.
"""

import sys

import torch
from fla.backends import register
from fla.modules.causal_conv1d import causal_conv1d, ops
from triton.runtime.autotuner import Autotuner, Heuristics

from offgpu.interpreter import make_faster


def keep_one_configuration():
    for kernel in vars(ops).values():
        while isinstance(kernel, Heuristics):
            kernel = kernel.fn
        if isinstance(kernel, Autotuner):
            kernel.configs = kernel.configs[:1]


@register(ops.compute_dh0_triton)
def no_state_gradient(initial_state, **kwargs):
    """Stands in for the one kernel that the interpreter cannot run: it makes integers of the mask `(t < seq_len) & m_d`."""
    return torch.zeros_like(initial_state)


def run(lengths, width, state, activation, packed):
    channels, sequences = 5, len(lengths)
    shape = (1, sum(lengths), channels) if packed else (sequences, lengths[0], channels)
    arguments = {
        'x': torch.randn(shape, requires_grad=True),
        'weight': torch.randn(channels, width, requires_grad=True),
        'bias': torch.randn(channels, requires_grad=True),
        'residual': torch.randn(shape, requires_grad=True),
        'initial_state': torch.randn(sequences, channels, width, requires_grad=True) if state else None,
        'activation': activation,
        'cu_seqlens': torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]) if packed else None,
    }
    outputs = causal_conv1d(**arguments, output_final_state=True)
    seeds = [torch.randn_like(output) for output in outputs]
    # the kernels take no gradient through column 0, which no output depends on
    seeds[1][..., 0] = 0
    names = ['x', 'weight', 'bias', 'residual']
    gradients = torch.autograd.grad(outputs, [arguments[name] for name in names], seeds)
    return {
        'arguments': {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()},
        'outputs': [output.detach() for output in outputs],
        'seeds': seeds,
        'gradients': dict(zip(names, gradients, strict=True)),
    }


if __name__ == '__main__':
    make_faster()
    torch.manual_seed(0)
    keep_one_configuration()
    cases = [
        run(lengths, width, state, activation, packed=True)
        for lengths in ([3, 0, 1, 2, 70, 1], [1, 1, 1])
        for width in (2, 3, 4)
        for state in (True, False)
        for activation in (None, 'silu')
        if state or activation
    ]
    cases += [
        run([length] * 2, width=4, state=state, activation='silu', packed=False)
        for length in (1, 2, 70)
        for state in (True, False)
    ]
    torch.save(cases, sys.argv[1])
