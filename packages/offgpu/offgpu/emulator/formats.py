"""PTX's number formats in NumPy: bfloat16, float16 and tf32 as bits, rounding, special cases of approximate functions."""

from __future__ import annotations

import numpy as np

TYPES = {
    'b8': np.uint8, 'u8': np.uint8, 's8': np.int8,
    'b16': np.uint16, 'u16': np.uint16, 's16': np.int16,
    'b32': np.uint32, 'u32': np.uint32, 's32': np.int32, 'f32': np.float32,
    'b64': np.uint64, 'u64': np.uint64, 's64': np.int64, 'f64': np.float64,
    'f16': np.uint16, 'bf16': np.uint16, 'f16x2': np.uint32, 'bf16x2': np.uint32, 'tf32': np.uint32,
    'pred': np.bool_,
}
UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
TINY = np.float32(2.0**-126)


def from_bf16(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x):
    """float32 to the nearest bfloat16, ties to even; a NaN stays one."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7fff) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7fff), rounded)


def from_f16(bits):
    return bits.view(np.float16).astype(np.float32)


def to_f16(x):
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)


HALF = {'bf16': (from_bf16, to_bf16), 'f16': (from_f16, to_f16)}


def low(bits):
    return bits.astype(np.uint16)


def high(bits):
    return (bits >> np.uint32(16)).astype(np.uint16)


def pack(lo, hi):
    return lo.astype(np.uint32) | (hi.astype(np.uint32) << np.uint32(16))


def cut_tf32(bits):
    """The upper 19 bits of a float32 register, which a tensor core reads."""
    return (bits & np.uint32(0xffffe000)).view(np.float32)


def flushed(x):
    """Subnormal float32 to zero, sign kept."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def fma(a, b, c):
    """float32, one rounding (float64 holds the product; the sum is rounded twice in rare ties)."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def approximate_division(a, b):
    """div.approx: a times a reciprocal that is 0 for 2^126 < |b|, and so a NaN for an infinite a."""
    reciprocal = np.where(np.abs(b) > np.float32(2.0**126), np.copysign(np.float32(0), b), np.float32(1) / b)
    return np.where(np.abs(b) > np.float32(2.0**126), a * reciprocal, a / b).astype(np.float32)


def shift_left(a, s):
    """By amounts clamped to the width, as PTX does."""
    bits = a.dtype.itemsize * 8
    return np.where(s >= bits, a.dtype.type(0), a << np.minimum(s, bits - 1).astype(a.dtype))


def shift_right(a, s):
    bits = a.dtype.itemsize * 8
    shifted = a >> np.minimum(s, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == 'i' else np.where(s >= bits, a.dtype.type(0), shifted)


def truncated_division(a, b):
    """Towards zero; what a division by zero gives is undefined, here -1."""
    b = np.broadcast_to(b, np.broadcast(a, b).shape)
    a = np.broadcast_to(a, b.shape)
    safe = np.where(b == 0, b.dtype.type(1), b)
    q = a // safe
    if a.dtype.kind == 'i':
        q += ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, ~b.dtype.type(0), q)


def high_product(a, b):
    """Upper half of the product of 32-bit or 64-bit integers."""
    bits = a.dtype.itemsize * 8
    if bits == 32:
        wide = np.int64 if a.dtype.kind == 'i' else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)
    product = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return np.asarray(product >> 64).astype(a.dtype)


def bit_field(a, position, length, signed: bool):
    """bfe of 32 or 64 bits, from a constant place inside the word."""
    unsigned, bits = a.dtype.type, a.dtype.itemsize * 8
    integer = np.int32 if bits == 32 else np.int64
    if length == 0:
        return np.zeros_like(a)
    length = min(length, bits - position)
    wide, shift = a << unsigned(bits - position - length), bits - length
    return (wide.view(integer) >> integer(shift)).view(unsigned) if signed else wide >> unsigned(shift)


def permuted(a, b, selector):
    """prmt: each byte of the result is one of the eight of (b, a); the selector's bit 3 spreads its sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for i in range(4):
        s = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = ((both >> (np.uint64(8) * (s & np.uint32(7)).astype(np.uint64))) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result = result | (np.where(s & np.uint32(8), sign, byte) << np.uint32(8 * i))
    return result


def logic3(sources: list[np.ndarray], table: int):
    """lop3: the function of three bits that the table lists."""
    a, b, c = sources
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return result
