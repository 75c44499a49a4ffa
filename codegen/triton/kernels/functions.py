"""Small functions that kernels may call. A kernel's source contains those that it calls.

Triton has no floor division, hyperbolic or inverse tangent, or rounding to even, and these must agree with
`ir/language/evaluate.py` both interpreted and compiled.
"""

import triton
import triton.language as tl


@triton.jit
def floor_divide(a, b):
    """a // b of integers, rounded down (the hardware rounds towards zero)."""
    quotient = a // b
    rest = a - quotient * b
    return quotient - tl.where((rest != 0) & ((rest < 0) != (b < 0)), 1, 0)


@triton.jit
def floor_modulo(a, b):
    """a % b of numbers, with the sign of b."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide_real(a, b):
    """a // b of real numbers: the largest whole number that a holds of b, by its exact remainder."""
    rest = a % b
    quotient = (a - rest) / b
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
    whole = tl.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1, whole)
    return tl.where(b == 0, a / b, whole)


@triton.jit
def tanh(x):
    """By exp(-2|x|), and by its series near zero, where the difference of near equals loses digits."""
    t = tl.exp2(tl.abs(x) * -2.8853900817779268)
    y = (1.0 - t) / (1.0 + t)
    x2 = x * x
    series = x + x * x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835))))
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -y, y))


@triton.jit
def tanh_half(x):
    """By exp(2x); absolute error below 2e-7, which 16-bit operands cannot see."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def atan(x):
    """By a polynomial up to 1 (Abramowitz & Stegun 4.4.49, error below 2e-8), above by that of 1 / x."""
    size = tl.abs(x)
    y = tl.where(size > 1, 1.0 / size, size)
    y2 = y * y
    p = -0.0752896400 + y2 * (0.0429096138 + y2 * (-0.0161657367 + y2 * 0.0028662257))
    p = -0.3333314528 + y2 * (0.1999355085 + y2 * (-0.1420889944 + y2 * (0.1065626393 + y2 * p)))
    y += y * y2 * p
    y = tl.where(size > 1, 1.5707963267948966 - y, y)
    return tl.where(x < 0, -y, y)


@triton.jit
def truncate(x):
    """Towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    """To the nearest whole number; halves to the even one."""
    low = tl.floor(x)
    odd = low * 0.5 != tl.floor(low * 0.5)
    return tl.where((x - low > 0.5) | ((x - low == 0.5) & odd), low + 1.0, low)


@triton.jit
def power(x, y):
    """x ** y of real numbers; a negative x only to whole powers."""
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    odd = tl.floor(y) * 0.5 != tl.floor(tl.floor(y) * 0.5)
    signed = tl.where(odd, -size, size)
    signed = tl.where(y == tl.floor(y), signed, float("nan"))
    return tl.where(y == 0, 1.0, tl.where(x < 0, signed, size))


@triton.jit
def stir(state, place):
    """One 32-bit round of `random`: the finaliser of MurmurHash3 on (state ^ place)."""
    state = state ^ (tl.cast(place, tl.uint32) * 0x9E3779B1)
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def uniform(seed, b, h, q, k):
    """A number in [0, 1) by a seed and four counters."""
    state = stir(stir(stir(stir(tl.cast(seed, tl.uint32), b), h), q), k)
    return tl.cast(state >> 8, tl.float32) * (1.0 / (1 << 24))


@triton.jit
def from_float8(x):
    """Numbers of float8_e4m3fn by their bits: a sign, an exponent whose bias is 7, 3 digits. None is NaN."""
    size = (x & 0x7F).to(tl.int32)
    usual = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    found = tl.where(size < 8, size.to(tl.float32) * 0.001953125, usual)
    return tl.where(x >= 128, -found, found)
