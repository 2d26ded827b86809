"""Longhorn's operator in ONNX: the step sizes in parallel, then a `Scan` over the tokens.

Shapes as in :func:`fla_longhorn.ops.naive_recurrent_longhorn`: q, k `[B, T, H, K]`, v `[B, T, H, V]`, states `[B, H, K, V]`.
Everything is float32.
"""

# onnxscript evaluates the annotations of its functions, so there is no `from __future__ import annotations`

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op

# torch.onnx translates PyTorch's own operators to this one
OPSET = 18


@script(default_opset=op)
def diagonal(
    S: FLOAT[...], q: FLOAT[...], k: FLOAT[...], v: FLOAT[...], eps: FLOAT[...],
) -> tuple[FLOAT[...], FLOAT[...]]:
    """`S_t = S_{t-1} + (k_t (x) eps_t) * (v_t - k_t * S_{t-1})` and `o_t = q_t^T S_t`; the tokens are the first dimension."""
    @graph()
    def step(S, q, k, v, eps):
        row, column = op.Constant(value_ints=[-2]), op.Constant(value_ints=[-1])
        K = op.Unsqueeze(k, column)
        S_t = S + (K * op.Unsqueeze(eps, row)) * (op.Unsqueeze(v, row) - K * S)
        o = op.Squeeze(op.MatMul(op.Unsqueeze(q, row), S_t), row)
        return S_t, o

    S_T, o = op.Scan(S, q, k, v, eps, body=step, num_scan_inputs=4)
    return o, S_T


@script(default_opset=op)
def exact_update(
    S: FLOAT[...], q: FLOAT[...], k: FLOAT[...], v: FLOAT[...], eps: FLOAT[...],
) -> tuple[FLOAT[...], FLOAT[...]]:
    """`S_t = S_{t-1} + k_t (x) eps_t * (v_t - k_t^T S_{t-1})` and `o_t = q_t^T S_t`; the tokens are the first dimension."""
    @graph()
    def step(S, q, k, v, eps):
        row, column = op.Constant(value_ints=[-2]), op.Constant(value_ints=[-1])
        u = op.Unsqueeze(eps, row) * (op.Unsqueeze(v, row) - op.MatMul(op.Unsqueeze(k, row), S))
        S_t = S + op.Unsqueeze(k, column) * u
        o = op.Squeeze(op.MatMul(op.Unsqueeze(q, row), S_t), row)
        return S_t, o

    S_T, o = op.Scan(S, q, k, v, eps, body=step, num_scan_inputs=4)
    return o, S_T


def longhorn_fwd(
    q, k, v, beta, scale, initial_state, output_final_state, exact, D, z, use_beta_sigmoid_in_kernel, state_v_first,
    cu_seqlens, allow_neg_eigval, g, disable_recompute, save_states, parallel,
):
    """The operator `fla_longhorn::longhorn_fwd`, whose arguments these are, as nodes of the graph that torch.onnx builds.

    Raises:
        ValueError: the call has packed sequences, a decay, or saves states for backward.
        TypeError: a tensor is not float32.
    """
    for name, x in {'cu_seqlens': cu_seqlens, 'g': g}.items():
        if x is not None:
            raise ValueError(f'{name} must be None: it has no translation to ONNX')
    if save_states:
        raise ValueError('save_states must be False: export under torch.no_grad()')
    for name, x in {'q': q, 'k': k, 'v': v, 'beta': beta, 'D': D, 'z': z}.items():
        if x is not None and x.dtype.name != 'FLOAT':
            raise TypeError(f'{name} must be float32 to be translated to ONNX, got {x.dtype.name}')
    per_head = len(beta.shape) == 3
    # [B, T, H, 1] or [B, T, H, V]
    beta = op.Sigmoid(beta) if use_beta_sigmoid_in_kernel else beta
    beta = op.Unsqueeze(beta, [-1]) if per_head else beta
    norm = op.ReduceSum(op.Mul(k, k), [-1], keepdims=1)
    eps = op.Div(op.Mul(beta, 2.0 if allow_neg_eigval else 1.0), op.Add(op.Mul(beta, norm), 1.0))
    # NaN where the step size underflows, rather than a zero that looks valid
    eps = op.Add(eps, op.Mul(op.Mul(norm, 4.0), 0.0))

    if initial_state is None:
        sizes = op.Concat(op.Shape(k, end=1), op.Shape(k, start=2), op.Shape(v, start=3), axis=0)
        initial_state = op.Expand(0.0, sizes)
    elif state_v_first:
        initial_state = op.Transpose(initial_state, perm=[0, 1, 3, 2])
    update = exact_update if exact else diagonal
    o, final_state = update(initial_state, *(op.Transpose(x, perm=[1, 0, 2, 3]) for x in (q, k, v, eps)))
    o = op.Mul(op.Transpose(o, perm=[1, 0, 2, 3]), scale)
    if D is not None:
        o = op.Add(o, op.Mul(D, v))
    if z is not None:
        o = op.Mul(o, op.Mul(z, op.Sigmoid(z)))
    if state_v_first:
        final_state = op.Transpose(final_state, perm=[0, 1, 3, 2])
    # an output that is not requested is empty
    nothing = op.Expand(0.0, [0])
    return o, final_state if output_final_state else nothing, nothing, nothing


TRANSLATIONS: dict[Callable, Callable[..., Any]] = {torch.ops.fla_longhorn.longhorn_fwd.default: longhorn_fwd}
"""For `torch.onnx.export(..., dynamo=True, opset_version=OPSET, custom_translation_table=TRANSLATIONS)`, under `no_grad()`."""
