"""Vectors of float32 channels as Numba types, for explicit vectorisation.

LLVM cannot vectorise the recurrence by itself: it does not know that the arrays do not overlap, and the sums over keys and
channels must keep their order. Every operation here is one LLVM vector instruction (or a few), which LLVM splits to the CPU's
registers. `+`, `-`, `*`, `/` take vectors, or a vector and a float32 for all lanes. A product and a sum may fuse (`contract`);
nothing else is relaxed, so NaN and inf propagate as usual.
"""

from __future__ import annotations

import math
import operator

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

# functions that only compiled loops call: without a wrapper for Python, which takes a fifth of the compile time
_options = dict(no_cpython_wrapper=True, no_cfunc_wrapper=True)
helper = njit(**_options)
# steps of one token use this: a call with its many arguments costs more than updating a small state
inlined = njit(forceinline=True, **_options)

FLOAT32 = types.float32
FLOAT, INT = ir.FloatType(), ir.IntType(32)
# the least x of which exp(x) is a normal number, about
LOWEST_EXP = -87.0
# above it, float32 has no finite value
HIGHEST_EXP = 88.72283172607422


class VecType(types.Type):
    """`width` float32 values in registers; a power of two."""

    def __init__(self, width: int):
        self.width = width
        super().__init__(name=f'Vec{width}')


@register_model(VecType)
class VecModel(models.PrimitiveModel):
    def __init__(self, manager, kind: VecType):
        super().__init__(manager, kind, ir.VectorType(FLOAT, kind.width))


# lanes of loops over rows, and of those over states, which share work among channels and are wider for it
W, WIDE = 16, 32
vec, wide = VecType(W), VecType(WIDE)


def _register_arithmetic(op, instruction):
    cases = [signature(kind, *pair) for kind in (vec, wide) for pair in ((kind, kind), (kind, FLOAT32), (FLOAT32, kind))]
    infer_global(op)(type('VecArithmetic', (ConcreteTemplate,), {'cases': cases}))

    def lower(context, builder, sig, args):
        lanes = (x if t == sig.return_type else broadcast(builder, x, sig.return_type.width)
                 for x, t in zip(args, sig.args, strict=True))
        return getattr(builder, instruction)(*lanes, flags=('contract',))

    for pair in ((VecType, VecType), (VecType, types.Float), (types.Float, VecType)):
        lower_builtin(op, *pair)(lower)


for _op, _instruction in (
    (operator.add, 'fadd'), (operator.sub, 'fsub'), (operator.mul, 'fmul'), (operator.truediv, 'fdiv'),
):
    _register_arithmetic(_op, _instruction)


def constant(kind, value):
    """An LLVM constant of an integer or a float, or of a vector of them, in each lane."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def shuffle(builder, a, b, lanes):
    """The given lanes of `a` and `b` concatenated."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes)))


def broadcast(builder, scalar, width):
    undefined = ir.Constant(ir.VectorType(FLOAT, width), ir.Undefined)
    return shuffle(builder, builder.insert_element(undefined, scalar, INT(0)), undefined, [0] * width)


def fold(builder, value, width):
    """`width` sums of every `width`-th lane, by halving: always in the same order."""
    while (half := value.type.count // 2) >= width:
        undefined = ir.Constant(value.type, ir.Undefined)
        value = builder.fadd(*(shuffle(builder, value, undefined, range(p, p + half)) for p in (0, half)), flags=('contract',))
    return value


@intrinsic
def sum_lanes(typingctx, x):
    """The sum of the lanes."""
    def codegen(context, builder, sig, args):
        return builder.extract_element(fold(builder, args[0], 1), INT(0))
    return types.float32(x), codegen


def _exp(builder, x):
    """`exp(x)` to about one unit in the last place, held at `exp(-87)` and `exp(88)` beyond; NaN stays NaN.

    `exp(x) = 2^n exp(r)` with `n` the integer nearest to `x / ln 2`, found by adding and subtracting 1.5 * 2^23, whose low
    bits then hold `n`, and a polynomial for `exp(r)`, `|r| <= ln 2 / 2`, with the coefficients of Cephes' expf.
    """
    kind = x.type
    ints = ir.VectorType(INT, kind.count)

    def number(value):
        return constant(kind, _f32(value))

    def clamp(y, predicate, limit):
        return builder.select(builder.fcmp_ordered(predicate, y, number(limit)), number(limit), y)

    def fma(a, b, c):
        return builder.fadd(builder.fmul(a, b, flags=('contract',)), c, flags=('contract',))

    x = clamp(clamp(x, '>', 88.0), '<', LOWEST_EXP)
    magic = number(1.5 * 2**23)
    shifted = builder.fadd(builder.fmul(x, number(1 / math.log(2))), magic)
    n = builder.fsub(shifted, magic)
    # ln 2 in two parts, the first exact in few bits
    r = fma(n, number(-0.693359375), x)
    r = fma(n, number(2.12194440e-4), r)
    p = number(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, number(c))
    p = builder.fadd(fma(p, builder.fmul(r, r), r), number(1.0))
    # n times the exponent's unit, added to the bits of p
    bits = builder.shl(builder.bitcast(shifted, ints), constant(ints, 23))
    return builder.bitcast(builder.add(builder.bitcast(p, ints), bits), kind)


@intrinsic
def exp_neg(typingctx, x):
    """`exp(-x)`, never zero or infinite."""
    def codegen(context, builder, sig, args):
        return _exp(builder, builder.fsub(constant(args[0].type, -0.0), args[0]))
    return x(x), codegen


@intrinsic
def exp(typingctx, x):
    """`exp(x)`, exactly one at zero, zero below -87, and infinite above :data:`HIGHEST_EXP`."""
    def codegen(context, builder, sig, args):
        kind = args[0].type
        is_low = builder.fcmp_ordered('<', args[0], constant(kind, LOWEST_EXP))
        is_high = builder.fcmp_ordered('>', args[0], constant(kind, HIGHEST_EXP))
        y = builder.select(is_high, constant(kind, float('inf')), _exp(builder, args[0]))
        return builder.select(is_low, constant(kind, 0.0), y)
    return x(x), codegen


@intrinsic
def product(typingctx, x, y):
    """`x * y`, rounded even where a sum follows: with y = 1, all that follows has the bits that it has without."""
    return x(x, y), lambda context, builder, sig, args: builder.fmul(*args)


@helper
def sigmoid(b_x):
    one = np.float32(1)
    return one / (one + exp_neg(b_x))


def _f32(value: float) -> float:
    """The float32 nearest to `value`: LLVM accepts only exact float constants."""
    return float(np.float32(value))
