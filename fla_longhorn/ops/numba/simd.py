"""A vector of `W` float32 channels as a Numba type, so that loops say what the CPU should run instead of hoping for it.

LLVM can't vectorise the recurrence by itself: it doesn't know that the arrays don't overlap, and the sums over keys and
channels must keep their order. Every operation here is one LLVM vector instruction (or a few), which each CPU splits
into its own registers; `+`, `-`, `*`, `/` work on vectors, and a product that is added fuses (`contract`), nothing else
is relaxed: NaN and inf behave as everywhere.
"""

from __future__ import annotations

import math
import operator

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

W = 16

# functions that only the compiled loops call: Numba need not make them callable from Python, a fifth of its time
_options = dict(no_cpython_wrapper=True, no_cfunc_wrapper=True)
helper = njit(**_options)
# for the steps of one token: a call, with all its arrays' parts as arguments, costs more than updating a small state
inlined = njit(forceinline=True, **_options)

FLOAT, INT = ir.FloatType(), ir.IntType(32)
VECTOR, INTS = ir.VectorType(FLOAT, W), ir.VectorType(INT, W)


class VecType(types.Type):
    """`W` float32 values in registers."""

    def __init__(self):
        super().__init__(name=f'Vec{W}')


vec = VecType()
register_model(VecType)(type('VecModel', (models.PrimitiveModel,), {
    '__init__': lambda self, dmm, fe_type: models.PrimitiveModel.__init__(self, dmm, fe_type, VECTOR),
}))


def _register_arithmetic(op, instruction):
    infer_global(op)(type('VecArithmetic', (ConcreteTemplate,), {'cases': [signature(vec, vec, vec)]}))

    @lower_builtin(op, vec, vec)
    def lower(context, builder, sig, args):
        return getattr(builder, instruction)(*args, flags=('contract',))


for _op, _instruction in (
    (operator.add, 'fadd'), (operator.sub, 'fsub'), (operator.mul, 'fmul'), (operator.truediv, 'fdiv'),
):
    _register_arithmetic(_op, _instruction)


def broadcast(builder, scalar):
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, INT(0))
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTS, [0] * W))


@intrinsic
def splat(typingctx, scalar):
    """A float32 in every lane."""
    def codegen(context, builder, sig, args):
        return broadcast(builder, args[0])
    return vec(types.float32), codegen


@intrinsic
def get_lane(typingctx, x, lane):
    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], builder.trunc(args[1], INT))
    return types.float32(vec, types.intp), codegen


@intrinsic
def set_lane(typingctx, x, lane, scalar):
    def codegen(context, builder, sig, args):
        return builder.insert_element(args[0], args[2], builder.trunc(args[1], INT))
    return vec(vec, types.intp, types.float32), codegen


@intrinsic
def sum_lanes(typingctx, x):
    """The sum of the lanes, in halves: always in the same order."""
    def codegen(context, builder, sig, args):
        value, width = args[0], W
        while width > 1:
            width //= 2
            halves = (ir.Constant(ir.VectorType(INT, width), list(range(a, a + width))) for a in (0, width))
            undefined = ir.Constant(value.type, ir.Undefined)
            value = builder.fadd(*(builder.shuffle_vector(value, undefined, half) for half in halves))
        return builder.extract_element(value, INT(0))
    return types.float32(vec), codegen


@intrinsic
def exp_neg(typingctx, x):
    """`exp(-x)` to about one unit in the last place, held at `exp(-88)` and `exp(88)` beyond; NaN stays NaN.

    `exp(y) = 2^n exp(r)` with `n` the integer nearest to `y / ln 2`, found by adding and taking off 1.5 * 2^23, whose
    low bits then hold `n`, and with a polynomial for `exp(r)`, `|r| <= ln 2 / 2`, the coefficients of Cephes' expf.
    """
    def codegen(context, builder, sig, args):
        def constant(value):
            return ir.Constant(VECTOR, [value] * W)

        def clamp(y, predicate, limit):
            return builder.select(builder.fcmp_ordered(predicate, y, constant(limit)), constant(limit), y)

        def fma(a, b, c):
            return builder.fadd(builder.fmul(a, b, flags=('contract',)), c, flags=('contract',))

        y = builder.fsub(constant(-0.0), args[0])
        y = clamp(clamp(y, '>', 88.0), '<', -87.0)
        magic = 1.5 * 2**23
        shifted = builder.fadd(builder.fmul(y, constant(_f32(1 / math.log(2)))), constant(magic))
        n = builder.fsub(shifted, constant(magic))
        # ln 2 in two parts, the first exact in few bits
        r = fma(n, constant(-0.693359375), y)
        r = fma(n, constant(_f32(2.12194440e-4)), r)
        p = constant(_f32(1.9875691500e-4))
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = fma(p, r, constant(_f32(c)))
        p = builder.fadd(fma(p, builder.fmul(r, r), r), constant(1.0))
        # n times the exponent's unit, added to the bits of p
        bits = builder.shl(builder.bitcast(shifted, INTS), ir.Constant(INTS, [23] * W))
        return builder.bitcast(builder.add(builder.bitcast(p, INTS), bits), VECTOR)
    return vec(vec), codegen


def _f32(value: float) -> float:
    """The float32 nearest to `value`: LLVM takes no other constant in float."""
    return float(np.float32(value))
