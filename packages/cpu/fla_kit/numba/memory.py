"""Memory access in the compiled loops: loads, stores and prefetches of vectors.

Arrays are flat and contiguous, float32 or bfloat16 (as uint16 in NumPy, :data:`BITS`). Loads widen to float32, stores round to
nearest even, as PyTorch does. An index is the position of the first element. Bounds are checked only with
`NUMBA_BOUNDSCHECK=1`; set another `NUMBA_CACHE_DIR` with it, because the cache does not tell the two apart.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import carray, config, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fla_kit.numba.simd import FLOAT, INT, VecType, broadcast, constant, fold, helper, shuffle, vec

# NumPy dtype of a tensor's elements in the loops
BITS: dict[torch.dtype, np.dtype] = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.uint16)}

SHORT = ir.IntType(16)


def _address(context, builder, array_type, array, index, width=1):
    array = context.make_array(array_type)(context, builder, array)
    if config.BOUNDSCHECK:
        for i in (index, builder.add(index, index.type(width - 1))):
            cgutils.do_boundscheck(context, builder, i, array.nitems)
    return builder.gep(array.data, [index])


def _is_short(array_type) -> bool:
    """Whether the elements are bfloat16, not float32; other types are a bug in the caller."""
    if array_type.dtype not in (types.float32, types.uint16):
        raise TypeError(f'elements must be float32, or the bits of bfloat16 as uint16, got {array_type.dtype}')
    return array_type.dtype == types.uint16


def _like(kind, of):
    """The type `of`, or a vector of it with the lanes of `kind`."""
    return ir.VectorType(of, kind.count) if isinstance(kind, ir.VectorType) else of


def _narrow(builder, value):
    """bfloat16 bits of the values; NaN becomes PyTorch's NaN, because rounding its payload could give infinity."""
    ints = _like(value.type, INT)
    bits = builder.bitcast(value, ints)
    odd = builder.and_(builder.lshr(bits, constant(ints, 16)), constant(ints, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(ints, 0x7fff))), constant(ints, 16))
    is_nan = builder.fcmp_unordered('uno', value, value)
    return builder.trunc(builder.select(is_nan, constant(ints, 0x7fc0), rounded), _like(value.type, SHORT))


def _masked(builder, name, kind, p, result, arguments):
    """LLVM's masked load or store of a `kind` at `p`; accesses no memory where the mask is off."""
    function = ir.FunctionType(result, [x.type for x in arguments])
    name = f'llvm.masked.{name}.v{kind.count}{kind.element.intrinsic_name}.p0'
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def _read(builder, p, array_type, kind, mask=None):
    """Load a float32 value or vector, of the type `kind`, from `p`; zero where a mask is off."""
    is_short = _is_short(array_type)
    narrow, align = (_like(kind, SHORT), 2) if is_short else (kind, 4)
    p = builder.bitcast(p, narrow.as_pointer())
    if mask is None:
        value = builder.load(p, align=align, typ=narrow)
    else:
        value = _masked(builder, 'load', narrow, p, narrow, [p, INT(align), mask, constant(narrow, 0)])
    if not is_short:
        return value
    ints = _like(kind, INT)
    return builder.bitcast(builder.shl(builder.zext(value, ints), constant(ints, 16)), kind)


def _write(builder, p, array_type, value, mask=None):
    is_short = _is_short(array_type)
    value, align = (_narrow(builder, value), 2) if is_short else (value, 4)
    p = builder.bitcast(p, value.type.as_pointer())
    if mask is None:
        builder.store(value, p, align=align)
    else:
        _masked(builder, 'store', value.type, p, ir.VoidType(), [value, p, INT(align), mask])


def _some(context, builder, array_type, array, index, n, width):
    """The address of `n` elements, fewer than `width`, and their mask."""
    if config.BOUNDSCHECK:
        with cgutils.for_range(builder, n) as loop:
            _address(context, builder, array_type, array, builder.add(index, loop.index))
    ints = ir.VectorType(n.type, width)
    first = builder.insert_element(ir.Constant(ints, ir.Undefined), n, INT(0))
    count = shuffle(builder, first, ir.Constant(ints, ir.Undefined), [0] * width)
    mask = builder.icmp_signed('<', ir.Constant(ints, list(range(width))), count)
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index]), mask


@intrinsic
def store(typingctx, x, index, value):
    """`x[index:index + W] = value`, a vector of `W`."""
    def codegen(context, builder, sig, args):
        _write(builder, _address(context, builder, sig.args[0], args[0], args[1], sig.args[2].width), sig.args[0], args[2])
        return context.get_dummy_value()
    return types.void(x, types.intp, value), codegen


CACHE_LINE = 64


def _prefetch(context, builder, address, num_bytes: int, to_write: int):
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INT, INT, INT])
    function = builder.module.declare_intrinsic('llvm.prefetch', [cgutils.voidptr_t], kind)
    for i in range(0, num_bytes, CACHE_LINE):
        p = builder.inttoptr(builder.add(address, address.type(i)), cgutils.voidptr_t)
        # into the L1 data cache
        builder.call(function, [p, INT(to_write), INT(3), INT(1)])
    return context.get_dummy_value()


def vectors(kind: VecType) -> tuple:
    """`splat`, `load`, `load_lanes`, `store_lanes`, `prefetch` and `prefetch_to_write` for vectors of a kind."""
    W, lanes = kind.width, ir.VectorType(FLOAT, kind.width)

    @intrinsic
    def splat(typingctx, scalar):
        """A float32 in every lane."""
        return kind(types.float32), lambda context, builder, sig, args: broadcast(builder, args[0], W)

    @intrinsic
    def load(typingctx, x, index):
        """`x[index:index + W]`."""
        def codegen(context, builder, sig, args):
            return _read(builder, _address(context, builder, sig.args[0], args[0], args[1], W), sig.args[0], lanes)
        return kind(x, types.intp), codegen

    @intrinsic
    def load_some(typingctx, x, index, n):
        def codegen(context, builder, sig, args):
            p, mask = _some(context, builder, sig.args[0], args[0], args[1], args[2], W)
            return _read(builder, p, sig.args[0], lanes, mask)
        return kind(x, types.intp, types.intp), codegen

    @helper
    def load_lanes(x, index, n):
        """The first `n` lanes from `x`, the rest zero."""
        if n >= W:
            return load(x, index)
        return load_some(x, index, n)

    @intrinsic
    def store_some(typingctx, x, index, value, n):
        def codegen(context, builder, sig, args):
            p, mask = _some(context, builder, sig.args[0], args[0], args[1], args[3], W)
            _write(builder, p, sig.args[0], args[2], mask)
            return context.get_dummy_value()
        return types.void(x, types.intp, kind, types.intp), codegen

    @helper
    def store_lanes(x, index, value, n):
        """Store the first `n` lanes."""
        if n >= W:
            store(x, index, value)
        else:
            store_some(x, index, value, n)

    def row(x):
        return W * x.dtype.bitwidth // 8

    @intrinsic
    def prefetch(typingctx, x, address):
        """Prefetch the cache lines of `W` elements of `x` at an address, which may be invalid."""
        return types.void(x, types.intp), lambda context, builder, sig, args: _prefetch(context, builder, args[1], row(x), 0)

    @intrinsic
    def prefetch_to_write(typingctx, x, address):
        return types.void(x, types.intp), lambda context, builder, sig, args: _prefetch(context, builder, args[1], row(x), 1)

    return splat, load, load_lanes, store_lanes, prefetch, prefetch_to_write


splat, load, load_lanes, store_lanes, prefetch, prefetch_to_write = vectors(vec)


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
def address_of(typingctx, x, index):
    """The address of `x[index]`, also out of bounds."""
    def codegen(context, builder, sig, args):
        array = context.make_array(sig.args[0])(context, builder, args[0])
        return builder.ptrtoint(builder.gep(array.data, [args[1]]), args[1].type)
    return types.intp(x, types.intp), codegen


@intrinsic
def load_columns(typingctx, x, index):
    """The four columns of `W` rows of four elements from `x[index]` on."""
    def codegen(context, builder, sig, args):
        size = 4 * vec.width
        p = _address(context, builder, sig.args[0], args[0], args[1], size)
        rows = _read(builder, p, sig.args[0], ir.VectorType(FLOAT, size))
        columns = [shuffle(builder, rows, rows, range(j, size, 4)) for j in range(4)]
        return context.make_tuple(builder, sig.return_type, columns)
    return types.UniTuple(vec, 4)(x, types.intp), codegen


@intrinsic
def store_columns(typingctx, x, index, columns):
    """Store `W` rows, from `x[index]` on, of one element of each of four columns."""
    def codegen(context, builder, sig, args):
        W = vec.width
        a, b, c, d = cgutils.unpack_tuple(builder, args[2], 4)
        ab, cd = shuffle(builder, a, b, range(2 * W)), shuffle(builder, c, d, range(2 * W))
        rows = shuffle(builder, ab, cd, [j * W + i for i in range(W) for j in range(4)])
        _write(builder, _address(context, builder, sig.args[0], args[0], args[1], 4 * W), sig.args[0], rows)
        return context.get_dummy_value()
    return types.void(x, types.intp, types.UniTuple(vec, 4)), codegen


@intrinsic
def store_folded(typingctx, x, index, value):
    """Reduce the wider vector `value` to `W` lanes, each a sum of its lanes, and store them: `x[index:index + W]`."""
    def codegen(context, builder, sig, args):
        value = fold(builder, args[2], vec.width)
        _write(builder, _address(context, builder, sig.args[0], args[0], args[1], vec.width), sig.args[0], value)
        return context.get_dummy_value()
    return types.void(x, types.intp, value), codegen


@intrinsic
def sum_rows(typingctx, x, index):
    """The sums of `W` rows of `W` elements from `x[index]` on, one per lane.

    A tree: pairs of rows are added to one row of sums of neighbours, until one is left.
    """
    def codegen(context, builder, sig, args):
        W = vec.width
        p = _address(context, builder, sig.args[0], args[0], args[1], W * W)
        rows = [
            _read(builder, builder.gep(p, [args[1].type(i * W)]), sig.args[0], ir.VectorType(FLOAT, W)) for i in range(W)
        ]
        while len(rows) > 1:
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [builder.fadd(*(shuffle(builder, a, b, range(side, 2 * W, 2)) for side in (0, 1))) for a, b in pairs]
        return rows[0]
    return vec(x, types.intp), codegen


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)
    return types.voidptr(types.intp), codegen


@helper
def array_at(address, size, dtype=BITS[torch.float32]):
    """`size` values of `dtype`, one of `BITS`, at an address; the caller keeps them alive."""
    return carray(_pointer(address), size, dtype)


def widened(x):
    """`x` as float32; copied only if it has another dtype."""
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
