"""How a token program's products with weights are given to the C of c/product.h and c/gemm.h."""

from __future__ import annotations

from collections.abc import Callable

from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language.token_program import GROUP, Given, Product, TokenProgram, extent

_TYPES = {
    "float32": "FLOAT", "bfloat16": "BF16", "float16": "F16", "int8": "INT8", "uint8": "UINT8",
    "int32": "INT32",
}  # fmt: skip
"""The types of given tensors as c/elements.h names them."""


def require_whole_groups(program: TokenProgram) -> None:
    """Raise where a product has groups that are no whole vectors, or a weight that cannot be read."""
    for number in range(len(program.given), len(program.given) + len(program.definitions)):
        about, by = program.product(number), program.scales(number)
        if about is None:
            continue
        weight, (_, depth) = program.given[about.weight], _extents(program, number)
        group = depth if by is None else by.group
        if weight.dtype == "int32":
            raise UnsupportedError("a product with a weight of int32")
        if group % GROUP and group != depth:
            raise UnsupportedError(f"a scale for each {group} elements of a weight")
        if weight.packed is not None and (about.turned or not weight.packed.splits(depth, group, GROUP)):
            raise UnsupportedError(f"a weight of {weight.word}, a scale for each {group} elements")


def weight(program: TokenProgram, number: int) -> Given:
    """The weight of a product."""
    return program.given[_product(program, number).weight]


def row_length(program: TokenProgram, number: int) -> int:
    """From one row of the weight to the next one: elements, or bytes if it is packed."""
    width, depth = _extents(program, number)
    if weight(program, number).packed is not None:
        return depth // 2
    return width if _product(program, number).turned else depth


def scales(program: TokenProgram, number: int, given: Callable[[int], str]) -> str:
    """What the C is told of the scales, and of how packed elements lie; `given` spells given tensors."""
    by, packed, (_, depth) = program.scales(number), weight(program, number).packed, _extents(program, number)
    parts = ["0", "0", str(depth), "1"]
    if by is not None:
        zero = "0" if by.zeros is None else given(by.zeros)
        parts = [given(by.scales), zero, str(by.group), str(depth // by.group)]
    if packed is not None:
        parts += [str(packed.run), str(int(packed.high_first))]
    return f"(Scales){{{', '.join(parts)}}}"


def function(program: TokenProgram, number: int) -> tuple[str, str]:
    """The function that computes a product, and the line that defines it."""
    by, (type_, word) = program.scales(number), _type_of(weight(program, number))
    if _product(program, number).turned:
        return f"product_turned_{word}", f"PRODUCT(product_turned_{word}, {type_}, 0, NONE, 1)\n"
    zeros = "NONE" if by is None or by.zeros is None else _TYPES[program.given[by.zeros].dtype]
    scaled = int(by is not None)
    name = f"product_{word}_{zeros}_{scaled}"
    return name, f"PRODUCT({name}, {type_}, {scaled}, {zeros}, 0)\n"


def _product(program: TokenProgram, number: int) -> Product:
    found = program.product(number)
    assert found is not None
    return found


def _extents(program: TokenProgram, number: int) -> tuple[int, int]:
    """The outputs of a product, and how many elements of each row it adds up."""
    made = program.definition(number)
    assert made is not None and made.over is not None
    return made.extents[0], extent(made.over)


def _type_of(weight: Given) -> tuple[str, str]:
    """The type of a weight's elements in C, and a word for it in names."""
    packed = weight.packed
    if packed is None:
        return _TYPES[weight.dtype], _TYPES[weight.dtype]
    sign, less = packed.signed * "SIGNED + ", f"{packed.less} + NOTHING_LESS"
    word = f"PACKED_{'SIGNED_' * packed.signed}{str(packed.less).replace('-', 'M')}"
    return f"(PACKED + {sign}({less}) * LESS)", word
