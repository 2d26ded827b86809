"""A vector of `W` float32 channels as a Numba type, so that loops say what the CPU should run instead of hoping for it.

LLVM can't vectorise the recurrence by itself: it doesn't know that the arrays don't overlap, and the sums over keys and
channels must keep their order. Every operation here is one LLVM vector instruction (or a few), which each CPU splits
into its own registers; `+`, `-`, `*`, `/` work on vectors, and a product that is added fuses (`contract`), nothing else
is relaxed: NaN and inf behave as everywhere.

Arrays are flat and contiguous, of float32 or of bfloat16, whose bits NumPy knows as uint16 (:data:`BITS`): loads widen them
to float32, stores round to the nearest, to even from halfway, as PyTorch does. An index is the position of the first element.
Bounds are checked only where Numba's own `NUMBA_BOUNDSCHECK=1` asks for it (with another `NUMBA_CACHE_DIR`: the cache doesn't
tell the two apart).
"""

from __future__ import annotations

import math
import operator

import numpy as np
import torch
from llvmlite import ir
from numba import carray, config, njit, types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, overload, register_model

W = 16

# how the loops see the elements of a tensor
BITS: dict[torch.dtype, np.dtype] = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.uint16)}

# functions that only the compiled loops call: Numba need not make them callable from Python, a fifth of its time
_options = dict(no_cpython_wrapper=True, no_cfunc_wrapper=True)
helper = njit(**_options)
# for the steps of one token: a call, with all its arrays' parts as arguments, costs more than updating a small state
inlined = njit(forceinline=True, **_options)

_FLOAT, _INT, _SHORT = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_VECTOR, _INTS, _SHORTS = (ir.VectorType(kind, W) for kind in (_FLOAT, _INT, _SHORT))


class VecType(types.Type):
    """`W` float32 values in registers."""

    def __init__(self):
        super().__init__(name=f'Vec{W}')


vec = VecType()
register_model(VecType)(type('VecModel', (models.PrimitiveModel,), {
    '__init__': lambda self, dmm, fe_type: models.PrimitiveModel.__init__(self, dmm, fe_type, _VECTOR),
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


def _address(context, builder, array_type, array, index, width=1):
    array = context.make_array(array_type)(context, builder, array)
    if config.BOUNDSCHECK:
        for i in (index, builder.add(index, index.type(width - 1))):
            cgutils.do_boundscheck(context, builder, i, array.nitems)
    return builder.gep(array.data, [index])


def _splat(builder, scalar):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_INTS, [0] * W))


def _is_short(array_type) -> bool:
    """Whether the elements are bfloat16; anything but that and float32 is a mistake of the caller."""
    if array_type.dtype not in (types.float32, types.uint16):
        raise TypeError(f'elements must be float32, or the bits of bfloat16 as uint16, got {array_type.dtype}')
    return array_type.dtype == types.uint16


def _widen(builder, bits, wide):
    """float32 values of the type `wide` from bfloat16 bits."""
    ints = _INTS if isinstance(wide, ir.VectorType) else _INT
    return builder.bitcast(builder.shl(builder.zext(bits, ints), _constant(ints, 16)), wide)


def _narrow(builder, value, narrow):
    """bfloat16 bits of the type `narrow`; NaN, whose payload could be rounded up to infinity, is the one of PyTorch."""
    ints = _INTS if isinstance(narrow, ir.VectorType) else _INT
    bits = builder.bitcast(value, ints)
    odd = builder.and_(builder.lshr(bits, _constant(ints, 16)), _constant(ints, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _constant(ints, 0x7fff))), _constant(ints, 16))
    is_nan = builder.fcmp_unordered('uno', value, value)
    return builder.trunc(builder.select(is_nan, _constant(ints, 0x7fc0), rounded), narrow)


def _constant(kind, value):
    return ir.Constant(kind, [value] * W if isinstance(kind, ir.VectorType) else value)


def _read(builder, p, array_type, wide):
    """Load a `wide` float32 value or vector from `p`."""
    if not _is_short(array_type):
        return builder.load(builder.bitcast(p, wide.as_pointer()), align=4, typ=wide)
    narrow = _SHORTS if wide is _VECTOR else _SHORT
    return _widen(builder, builder.load(builder.bitcast(p, narrow.as_pointer()), align=2, typ=narrow), wide)


def _write(builder, p, array_type, value):
    if not _is_short(array_type):
        builder.store(value, builder.bitcast(p, value.type.as_pointer()), align=4)
        return
    narrow = _SHORTS if value.type == _VECTOR else _SHORT
    builder.store(_narrow(builder, value, narrow), builder.bitcast(p, narrow.as_pointer()), align=2)


@intrinsic
def load(typingctx, x, index):
    """`x[index:index + W]`."""
    def codegen(context, builder, sig, args):
        return _read(builder, _address(context, builder, sig.args[0], args[0], args[1], W), sig.args[0], _VECTOR)
    return vec(x, types.intp), codegen


@intrinsic
def store(typingctx, x, index, value):
    """`x[index:index + W] = value`."""
    def codegen(context, builder, sig, args):
        _write(builder, _address(context, builder, sig.args[0], args[0], args[1], W), sig.args[0], args[2])
        return context.get_dummy_value()
    return types.void(x, types.intp, vec), codegen


@intrinsic
def load_one(typingctx, x, index):
    """`x[index]` as float32."""
    def codegen(context, builder, sig, args):
        return _read(builder, _address(context, builder, sig.args[0], *args), sig.args[0], _FLOAT)
    return types.float32(x, types.intp), codegen


@intrinsic
def store_one(typingctx, x, index, value):
    """`x[index] = value`, a float32."""
    def codegen(context, builder, sig, args):
        _write(builder, _address(context, builder, sig.args[0], args[0], args[1]), sig.args[0], args[2])
        return context.get_dummy_value()
    return types.void(x, types.intp, types.float32), codegen


@intrinsic
def load_splat(typingctx, x, index):
    """`x[index]` in every lane."""
    def codegen(context, builder, sig, args):
        return _splat(builder, _read(builder, _address(context, builder, sig.args[0], *args), sig.args[0], _FLOAT))
    return vec(x, types.intp), codegen


@intrinsic
def address_of(typingctx, x, index):
    """Where `x[index]` lies, or would lie."""
    def codegen(context, builder, sig, args):
        array = context.make_array(sig.args[0])(context, builder, args[0])
        return builder.ptrtoint(builder.gep(array.data, [args[1]]), args[1].type)
    return types.intp(x, types.intp), codegen


def _prefetch(context, builder, address, to_write: int):
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _INT, _INT, _INT])
    function = builder.module.declare_intrinsic('llvm.prefetch', [cgutils.voidptr_t], kind)
    # into the first cache, of data
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), _INT(to_write), _INT(3), _INT(1)])
    return context.get_dummy_value()


@intrinsic
def prefetch(typingctx, address):
    """Have the cache line of an address on its way, if there is memory."""
    return types.void(types.intp), lambda context, builder, sig, args: _prefetch(context, builder, args[0], 0)


@intrinsic
def prefetch_to_write(typingctx, address):
    return types.void(types.intp), lambda context, builder, sig, args: _prefetch(context, builder, args[0], 1)


@intrinsic
def splat(typingctx, scalar):
    """A float32 in every lane."""
    def codegen(context, builder, sig, args):
        return _splat(builder, args[0])
    return vec(types.float32), codegen


@intrinsic
def get_lane(typingctx, x, lane):
    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], builder.trunc(args[1], _INT))
    return types.float32(vec, types.intp), codegen


@intrinsic
def set_lane(typingctx, x, lane, scalar):
    def codegen(context, builder, sig, args):
        return builder.insert_element(args[0], args[2], builder.trunc(args[1], _INT))
    return vec(vec, types.intp, types.float32), codegen


@intrinsic
def sum_lanes(typingctx, x):
    """The sum of the lanes, in halves: always in the same order."""
    def codegen(context, builder, sig, args):
        value, width = args[0], W
        while width > 1:
            width //= 2
            halves = (ir.Constant(ir.VectorType(_INT, width), list(range(a, a + width))) for a in (0, width))
            undefined = ir.Constant(value.type, ir.Undefined)
            value = builder.fadd(*(builder.shuffle_vector(value, undefined, half) for half in halves))
        return builder.extract_element(value, _INT(0))
    return types.float32(vec), codegen


@intrinsic
def add_sums(typingctx, x, index, a, b):
    """`x[index] += sum_lanes(a)` and `x[index + 1] += sum_lanes(b)`, together for little more than the price of one."""
    def codegen(context, builder, sig, args):
        def shuffle(value, lanes):
            lanes = ir.Constant(ir.VectorType(_INT, len(lanes)), lanes)
            return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)

        def interleave(a, b, first):
            # in groups of four lanes, which is what the instruction does
            lanes = [lane + side * (W // 2) for g in range(0, W // 2, 4) for lane in (g + first, g + first + 1)
                     for side in (0, 1)]
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, W // 2), lanes))

        low, high = list(range(W // 2)), list(range(W // 2, W))
        a, b = (builder.fadd(shuffle(value, low), shuffle(value, high)) for value in args[2:])
        value, width = builder.fadd(interleave(a, b, 0), interleave(a, b, 2)), W // 2
        while width > 2:
            width //= 2
            value = builder.fadd(shuffle(value, list(range(width))), shuffle(value, list(range(width, 2 * width))))
        p = builder.bitcast(_address(context, builder, sig.args[0], args[0], args[1], 2), value.type.as_pointer())
        builder.store(builder.fadd(builder.load(p, align=4, typ=value.type), value), p, align=4)
        return context.get_dummy_value()
    return types.void(x, types.intp, vec, vec), codegen


@intrinsic
def exp_neg(typingctx, x):
    """`exp(-x)` to about one unit in the last place, held at `exp(-88)` and `exp(88)` beyond; NaN stays NaN.

    `exp(y) = 2^n exp(r)` with `n` the integer nearest to `y / ln 2`, found by adding and taking off 1.5 * 2^23, whose
    low bits then hold `n`, and with a polynomial for `exp(r)`, `|r| <= ln 2 / 2`, the coefficients of Cephes' expf.
    """
    def codegen(context, builder, sig, args):
        def constant(value):
            return ir.Constant(_VECTOR, [value] * W)

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
        bits = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * W))
        return builder.bitcast(builder.add(builder.bitcast(p, _INTS), bits), _VECTOR)
    return vec(vec), codegen


def _f32(value: float) -> float:
    """The float32 nearest to `value`: LLVM takes no other constant in float."""
    return float(np.float32(value))


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)
    return types.voidptr(types.intp), codegen


@helper
def array_at(address, size, dtype=BITS[torch.float32]):
    """The `size` values of `dtype`, of those in `BITS`, at an address; who calls keeps them alive."""
    return carray(_pointer(address), size, dtype)


def widened(x):
    """The values of `x` as float32, in memory of their own only where they are not."""
    raise NotImplementedError('in compiled loops only')


@overload(widened)
def _(x):
    if not _is_short(x):
        return lambda x: x

    def copy(x):
        y = np.empty(len(x), np.float32)
        for i in range(len(x)):
            y[i] = load_one(x, i)
        return y
    return copy


@helper
def load_lanes(x, index, n):
    """The first `n` lanes from `x`, the rest zero."""
    if n >= W:
        return load(x, index)
    value = splat(types.float32(0))
    for i in range(n):
        value = set_lane(value, i, load_one(x, index + i))
    return value


@helper
def store_lanes(x, index, value, n):
    """Store the first `n` lanes."""
    if n >= W:
        store(x, index, value)
    else:
        for i in range(n):
            store_one(x, index + i, get_lane(value, i))
