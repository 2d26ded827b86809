"""Arrays of the compiled loops: vectors of elements from memory and back, and asking for memory ahead of its use.

Arrays are flat and contiguous, of float32 or of bfloat16, whose bits NumPy knows as uint16 (:data:`BITS`): loads widen them
to float32, stores round to the nearest, to even from halfway, as PyTorch does. An index is the position of the first element.
Bounds are checked only where Numba's own `NUMBA_BOUNDSCHECK=1` asks for it (with another `NUMBA_CACHE_DIR`: the cache doesn't
tell the two apart).
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import carray, config, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fla_longhorn.ops.numba.simd import FLOAT, INT, INTS, VECTOR, W, broadcast, get_lane, helper, set_lane, splat, vec

# how the loops see the elements of a tensor
BITS: dict[torch.dtype, np.dtype] = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.uint16)}

SHORT = ir.IntType(16)
SHORTS = ir.VectorType(SHORT, W)


def _address(context, builder, array_type, array, index, width=1):
    array = context.make_array(array_type)(context, builder, array)
    if config.BOUNDSCHECK:
        for i in (index, builder.add(index, index.type(width - 1))):
            cgutils.do_boundscheck(context, builder, i, array.nitems)
    return builder.gep(array.data, [index])


def _is_short(array_type) -> bool:
    """Whether the elements are bfloat16; anything but that and float32 is a mistake of the caller."""
    if array_type.dtype not in (types.float32, types.uint16):
        raise TypeError(f'elements must be float32, or the bits of bfloat16 as uint16, got {array_type.dtype}')
    return array_type.dtype == types.uint16


def _widen(builder, bits, wide):
    """float32 values of the type `wide` from bfloat16 bits."""
    ints = INTS if isinstance(wide, ir.VectorType) else INT
    return builder.bitcast(builder.shl(builder.zext(bits, ints), _constant(ints, 16)), wide)


def _narrow(builder, value, narrow):
    """bfloat16 bits of the type `narrow`; NaN, whose payload could be rounded up to infinity, is the one of PyTorch."""
    ints = INTS if isinstance(narrow, ir.VectorType) else INT
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
    narrow = SHORTS if wide is VECTOR else SHORT
    return _widen(builder, builder.load(builder.bitcast(p, narrow.as_pointer()), align=2, typ=narrow), wide)


def _write(builder, p, array_type, value):
    if not _is_short(array_type):
        builder.store(value, builder.bitcast(p, value.type.as_pointer()), align=4)
        return
    narrow = SHORTS if value.type == VECTOR else SHORT
    builder.store(_narrow(builder, value, narrow), builder.bitcast(p, narrow.as_pointer()), align=2)


@intrinsic
def load(typingctx, x, index):
    """`x[index:index + W]`."""
    def codegen(context, builder, sig, args):
        return _read(builder, _address(context, builder, sig.args[0], args[0], args[1], W), sig.args[0], VECTOR)
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
        return _read(builder, _address(context, builder, sig.args[0], *args), sig.args[0], FLOAT)
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
        return broadcast(builder, _read(builder, _address(context, builder, sig.args[0], *args), sig.args[0], FLOAT))
    return vec(x, types.intp), codegen


@intrinsic
def address_of(typingctx, x, index):
    """Where `x[index]` lies, or would lie."""
    def codegen(context, builder, sig, args):
        array = context.make_array(sig.args[0])(context, builder, args[0])
        return builder.ptrtoint(builder.gep(array.data, [args[1]]), args[1].type)
    return types.intp(x, types.intp), codegen


def _prefetch(context, builder, address, to_write: int):
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INT, INT, INT])
    function = builder.module.declare_intrinsic('llvm.prefetch', [cgutils.voidptr_t], kind)
    # into the first cache, of data
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), INT(to_write), INT(3), INT(1)])
    return context.get_dummy_value()


@intrinsic
def prefetch(typingctx, address):
    """Have the cache line of an address on its way, if there is memory."""
    return types.void(types.intp), lambda context, builder, sig, args: _prefetch(context, builder, args[0], 0)


@intrinsic
def prefetch_to_write(typingctx, address):
    return types.void(types.intp), lambda context, builder, sig, args: _prefetch(context, builder, args[0], 1)


@intrinsic
def add_sums(typingctx, x, index, a, b):
    """`x[index] += sum_lanes(a)` and `x[index + 1] += sum_lanes(b)`, together for little more than the price of one."""
    def codegen(context, builder, sig, args):
        def shuffle(value, lanes):
            lanes = ir.Constant(ir.VectorType(INT, len(lanes)), lanes)
            return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)

        def interleave(a, b, first):
            # in groups of four lanes, which is what the instruction does
            lanes = [lane + side * (W // 2) for g in range(0, W // 2, 4) for lane in (g + first, g + first + 1)
                     for side in (0, 1)]
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, W // 2), lanes))

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
