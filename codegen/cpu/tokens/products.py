"""How a token program's products with weights are given to the C of c/product.h and the headers after it.

Programs share the code of their products, for which the C compiler takes longest: each kind of product is a
library of its own, and a program's library has a pointer to each. How a weight lies is known when compiling,
because few registers are left for what is not; how wide it is, is not.
"""

import dataclasses

from attngraph.codegen.cpu.native import ORDER, header, numbers
from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.dtypes import NAMED
from attngraph.ir.language.token_program import GROUP, Given, TokenProgram, extent

IN_PANELS = numbers("tokens.h")["IN_PANELS"]
HEADERS = ("functions", "elements", "tile", "weights", "product", "strands", "gemm", "rows", "tokens")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of product.

    Attributes:
        name: in the source of a program.
        type, scaled, zeros, turned: arguments of `product` in c/tokens.h. in_panels: of the weight.
        row: from one row of the weight to the next one, in elements, or bytes if it is packed.
        depth: of the product.
        scales: the numbers in `Scales`.
        short: whether there are elements that are not float32.
        ordered: whether the results are the same numbers whatever rows they are computed with.
    """

    name: str
    type: str
    scaled: int
    zeros: str
    turned: int
    row: int
    depth: int
    scales: tuple[int, ...]
    short: bool
    ordered: bool

    @property
    def in_panels(self) -> bool:
        return self.turned == IN_PANELS

    @property
    def goes_across(self) -> bool:
        """Whether vectors may be of rows (c/rows.h)."""
        plain = (self.type, self.scaled, self.zeros, self.turned) == ("FLOAT", 0, "NONE", 0)
        return plain and not self.ordered

    @property
    def source(self) -> str:
        """The source of a library with this product, as `attngraph_product`."""
        scales = f"(Scales){{scale, zero, {', '.join(map(str, self.scales))}}}"
        before = preamble(self.short, self.ordered)
        return "\n".join([before, *(header(f"{name}.h") for name in HEADERS), f"""\
void attngraph_product(const float *x, int64_t ldx, const void *w, const float *scale, const void *zero,
                       int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs, int64_t from,
                       int64_t until, float *panels, float *arranged) {{
    product(x, ldx, w, {self.row}, {self.depth}, {scales}, first, y, ldy, rows, outs, from, until, panels,
            arranged, {self.type}, {self.scaled}, {self.zeros}, {self.turned});
}}
"""])  # fmt: skip


def require_whole_groups(program: TokenProgram) -> None:
    """Raise where a product has groups that are no whole vectors, or a weight that cannot be read."""
    for number in range(len(program.given), len(program.given) + len(program.definitions)):
        about, by = program.product(number), program.scales(number)
        if about is None:
            continue
        weight, (_, depth) = program.given[about.weight], _extents(program, number)
        group = depth if by is None else by.group
        if weight.in_panels and (about.turned or by is not None):
            raise UnsupportedError("a weight in panels that is turned, or has scales")
        if weight.dtype == "int32":
            raise UnsupportedError("a product with a weight of int32")
        if group % GROUP and group != depth:
            raise UnsupportedError(f"a scale for each {group} elements of a weight")
        if weight.packed is not None and (about.turned or not weight.packed.splits(depth, group, GROUP)):
            raise UnsupportedError(f"a weight of {weight.word}, a scale for each {group} elements")


def kind(program: TokenProgram, number: int) -> Kind:
    """What the code of a product depends on."""
    by, factors = program.scales(number), program.product(number)
    assert factors is not None
    about, turned, (width, depth) = program.given[factors.weight], factors.turned, _extents(program, number)
    type_, word = _type_of(about)
    zero = None if by is None else by.zeros
    group = depth if by is None else by.group
    lengths = [group, depth // group]
    if about.packed is not None:
        lengths += [about.packed.run, int(about.packed.high_first)]
    zeros = "NONE" if zero is None else NAMED[program.given[zero].dtype].word
    row, scaled = depth // 2 if about.packed is not None else width if turned else depth, int(by is not None)
    how = IN_PANELS if about.in_panels else int(turned)
    head = ("product", "turned", "panels")[how] + "_ordered" * program.in_order
    parts = [head, word, zeros, scaled, row, depth, *lengths]
    short = about.dtype != "float32" or zeros not in ("NONE", "FLOAT")
    name = "_".join(map(str, parts))
    return Kind(name, type_, scaled, zeros, how, row, depth, tuple(lengths), short, program.in_order)


def preamble(short: bool, ordered: bool) -> str:
    """What stands before the headers. `short`: there are elements that are not float32. `ordered`: a result
    is the same number whatever it is computed with."""
    defines = ["FLOAT32", *["SHORT_ELEMENTS"] * short, *["ORDERED"] * ordered, *ORDER]
    return "".join(f"#define {flag}\n" for flag in defines)


def _extents(program: TokenProgram, number: int) -> tuple[int, int]:
    """The outputs of a product, and how many elements of each row it adds up."""
    made = program.definition(number)
    assert made is not None and made.over is not None
    return made.extents[0], extent(made.over)


def _type_of(weight: Given) -> tuple[str, str]:
    """The type of a weight's elements in C, and a word for it in names."""
    packed = weight.packed
    if packed is None:
        return (NAMED[weight.dtype].word,) * 2
    sign, less = packed.signed * "SIGNED + ", f"{packed.less} + NOTHING_LESS"
    word = f"PACKED_{'SIGNED_' * packed.signed}{str(packed.less).replace('-', 'M')}"
    return f"(PACKED + {sign}({less}) * LESS)", word
