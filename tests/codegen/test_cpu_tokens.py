"""Token programs computed by C, against the reference: products, folds, selections, many tokens."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu import chosen, toolchain
from attngraph.codegen.cpu.native import header
from attngraph.codegen.cpu.tokens import products, run, schedule
from attngraph.codegen.cpu.tokens.source import kinds_of_products, write
from attngraph.ir.language.packed import Packed
from attngraph.ir.language.token_program import GROUP, Given, TokenProgram, parse
from attngraph.ir.ops.kernels import SHARED_END
from attngraph.ir.ops.panels import in_panels
from attngraph.ir.ops.token_program import reference

ROWS = (*range(1, 10), 17, 31, 32, 33, 47, 600)


def computed(text: str, given: list[Tensor], multiplier: str) -> list[Tensor]:
    """The results, with many tokens multiplied by one or the other, however few there are."""
    times = dict.fromkeys((run.OURS, run.PYTORCH), 0.3) | {multiplier: 0.1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LARGE", 0)
        patch.setattr(chosen, "known", lambda kind: times)
        found = run.Tokens().run(text, given)
    assert found is not None
    return found


def multipliers(tokens: int) -> list[str]:
    return [run.OURS] if tokens <= run.FEW else [run.OURS, run.PYTORCH]


def check(text: str, tokens: int, given: list[Tensor] | None = None) -> None:
    """The C's results are those of the reference in float64, whoever multiplies."""
    program = parse(text)
    assert parse(program.text) == program
    generator = torch.Generator().manual_seed(0)
    if given is None:
        given = [
            torch.randn([tokens if n is None else n for n in about.shape], generator=generator)
            / (max(n or 1 for n in about.shape) ** 0.5 if about.token_dim is None else 1)
            if about.dtype == "float32" else integers(about, generator)
            for about in program.given
        ]  # weights that keep the size of values  # fmt: skip
        given = [
            in_panels(t, False, run.TOKENS.panel(), False) if about.in_panels else t
            for t, about in zip(given, program.given, strict=True)
        ]
    wanted = reference(program, [t.double() if t.is_floating_point() else t for t in given])
    for multiplier in multipliers(tokens):
        for one, other in zip(computed(text, given, multiplier), wanted, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    if tokens in (9, 47):
        check_in_order(program, tokens, given, wanted)


def check_in_order(program: TokenProgram, tokens: int, given: list[Tensor], wanted: list[Tensor]) -> None:
    """In order, tokens have the same bits alone, beside a few others, and beside many."""
    text = f"{program.text}\nin order"
    together = computed(text, given, run.PYTORCH)
    for one, other in zip(together, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    for first, count in ((0, 1), (2, 5), (tokens - 3, 3)):
        some = [
            t if about.token_dim is None else t.narrow(about.token_dim, first, count)
            for t, about in zip(given, program.given, strict=True)
        ]
        for one, other, result in zip(computed(text, some, run.OURS), together, program.results, strict=True):
            assert torch.equal(one, other.narrow(result.token_dim, first, count)), (first, count)


def integers(about: Given, generator: torch.Generator) -> Tensor:
    """All values of the dtype."""
    if about.packed is not None:
        outs, depth = (n or 1 for n in about.shape)
        return torch.randint(0, 256, (outs, depth // 2), dtype=torch.uint8, generator=generator)
    dtype: torch.dtype = getattr(torch, about.dtype)
    limits = torch.iinfo(torch.int8 if dtype == torch.int32 else dtype)
    shape = [n for n in about.shape if n is not None]
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype, generator=generator)


def product(depth: int, width: int, turned: bool) -> str:
    weight, index = (f"{depth}, {width}", "j, i0") if turned else (f"{width}, {depth}", "i0, j")
    return (
        f"r0[1, t, {depth}]\nr1[{weight}]\nr2[{width}]\nr3[i0 < {depth}] = r0[0, t, i0] * 2.0\n"
        f"r4[i0 < {width}] = sum[j < {depth}] r3[j] * r1[{index}]\nr5[i0 < {width}] = tanh(r4[i0]) + r2[i0]\n"
        f"return r5[1, t, {width}], r4[t, {width}]"
    )


@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(64, 96), (37, 53), (16, 3), (1027, 129), (5, 1000)])
def test_products(depth: int, width: int, turned: bool, tokens: int) -> None:
    check(product(depth, width, turned), tokens)


@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize(("depth", "width"), [(64, 96), (37, 53), (16, 3), (1027, 129), (5, 1000)])
def test_products_with_panels(depth: int, width: int, tokens: int) -> None:
    text = product(depth, width, False).replace(
        f"r1[{width}, {depth}]\n", f"r1[{width}, {depth}] in panels\n"
    )
    check(text, tokens)


@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_a_weight_has_the_same_bits_in_order_however_it_lies(tokens: int) -> None:
    x, weight, bias = torch.randn(1, tokens, 1027), torch.randn(70, 1027), torch.randn(70)
    plain, turned = product(1027, 70, False), product(1027, 70, True)
    in_panel = plain.replace("r1[70, 1027]\n", "r1[70, 1027] in panels\n")
    laid = in_panels(weight, False, run.TOKENS.panel(), False)
    found = [
        computed(f"{text}\nin order", [x, given, bias], run.OURS)[1]
        for text, given in ((plain, weight), (turned, weight.T.contiguous()), (in_panel, laid))
    ]
    assert all(torch.equal(one, found[0]) for one in found)


def test_panels_beside_other_weights_are_computed_together() -> None:
    """A group of products whose columns a thread computes together, of which one lies in panels."""
    text = (
        "r0[1, t, 40]\nr1[100, 40] in panels\nr2[40, 100]\nr3[i0 < 40] = r0[0, t, i0] * 2.0\n"
        "r4[i0 < 100] = sum[j < 40] r3[j] * r1[i0, j]\nr5[i0 < 100] = sum[j < 40] r3[j] * r2[j, i0]\n"
        "r6[i0 < 100] = tanh(r4[i0]) * r5[i0]\nreturn r6[1, t, 100]"
    )
    for tokens in (1, 5, 33, 600):
        check(text, tokens)


def test_panels_of_another_width_are_left_to_pytorch() -> None:
    """A file may have panels of another machine; and nothing but a product reads them."""
    text = product(24, 80, False).replace("r1[80, 24]\n", "r1[80, 24] in panels\n")
    x, w, b = torch.randn(1, 3, 24), torch.randn(80, 24), torch.randn(80)
    other = in_panels(w, False, run.TOKENS.panel() // 2, False)
    assert run.Tokens().run(text, [x, other, b]) is None
    (found, *_), (wanted, *_) = (
        reference(parse(text), [x, p, b]) for p in (other, in_panels(w, False, 7, False))
    )
    assert torch.equal(found, wanted)
    assert (
        run.Tokens().source(
            parse("r0[t, 4]\nr1[4, 4] in panels\nr2[i0 < 4] = r0[t, i0] * r1[0, i0]\nreturn r2[t, 4]")
        )
        == ""
    )


@pytest.mark.parametrize("tokens", [40, 48, 64, 77, 112, 128, 157, 190, 192, 193])
@pytest.mark.parametrize(("depth", "width"), [(64, 24), (37, 53), (768, 129), (3072, 40), (5, 1300)])
def test_products_whose_vectors_are_of_rows(depth: int, width: int, tokens: int) -> None:
    """As many rows as fill vectors of 16, 8 or 4, or nearly, and others."""
    check(product(depth, width, False), tokens)


def gated(depth: int, width: int) -> str:
    """Two products by weights `[in, out]` that are computed together, another beside them, one after them."""
    return (
        f"r0[t, {depth}]\nr1[{depth}, {width}]\nr2[{depth}, {width}]\nr3[{depth}, 9]\nr4[{width}, 7]\n"
        f"r5[i0 < {depth}] = r0[t, i0] * 1.0\n"
        f"r6[i0 < {width}] = sum[j < {depth}] r5[j] * r1[j, i0]\n"
        f"r7[i0 < {width}] = sum[j < {depth}] r5[j] * r2[j, i0]\n"
        f"r8[i0 < 9] = sum[j < {depth}] r5[j] * r3[j, i0]\n"
        f"r9[i0 < {width}] = r6[i0] * sigmoid(r6[i0]) * r7[i0]\n"
        f"r10[i0 < 7] = sum[j < {width}] r9[j] * r4[j, i0]\n"
        f"return r10[t, 7], r7[t, {width}], r8[t, 9]"
    )


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 9, 32])
@pytest.mark.parametrize(("depth", "width"), [(2051, 72), (2051, 1100)])
def test_threads_share_the_depth_of_narrow_weights(depth: int, width: int, tokens: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(gated(depth, width), tokens)
    finally:
        torch.set_num_threads(before)


def test_the_sums_of_parts_of_the_depth_have_room() -> None:
    names = ("parts_of_depth", "room_of_sums")
    functions = "".join(
        f"int64_t {name}_(int64_t w, int64_t d, int64_t t, int64_t m) {{ return {name}(w, d, t, m); }}\n"
        for name in names
    )
    headers = (header(f"{name}.h") for name in products.HEADERS)
    library, _ = toolchain.build("\n".join([products.preamble(False, False), *headers, functions]))
    parts, room = (getattr(library, f"{name}_") for name in names)
    for function in (parts, room):
        function.argtypes, function.restype = [ctypes.c_int64] * 4, ctypes.c_int64
    divided = 0
    for width, depth, members in itertools.product(
        (1, 768, 1024, 2047, 2048, 5000), (1, 63, 64, 127, 768, 3072), (1, 2, 3, 4, 6, 64)
    ):
        for tokens in range(1, run.FEW + 1):
            count = parts(width, depth, tokens, members)
            assert 1 <= count <= max(1, depth) and members % count == 0
            if count > 1:
                divided += 1
                assert all(count * tokens * width <= room(width, depth, most, members)
                           for most in range(tokens, run.FEW + 1))  # fmt: skip
    assert divided and parts(768, 3072, 1, 2) == 2 and parts(2304, 768, 1, 2) == 1


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("weight", ["12, 16", "12, 40", "20, 16"])
def test_sums_over_some_of_the_elements(weight: str, tokens: int) -> None:
    """Of a value, or of a matrix: no product of whole ones."""
    text = (
        f"r0[1, t, 40]\nr1[{weight}]\nr2[i0 < 40] = r0[0, t, i0] * 2.0\n"
        "r3[i0 < 12] = sum[j < 16] r2[j] * r1[i0, j]\nreturn r3[1, t, 12]"
    )
    check(text, tokens)


@pytest.mark.parametrize("tokens", [1, 2, 5, 32, 33, 600])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("depth", "width"), [(64, 96), (37, 53), (768, 129)])
def test_products_in_16_bits(depth: int, width: int, dtype: torch.dtype, turned: bool, tokens: int) -> None:
    """Read and returned in 16 bits, computed in float32; where PyTorch multiplies, in 16 bits."""
    word, generator = str(dtype).removeprefix("torch."), torch.Generator().manual_seed(0)
    weight, index = (f"{depth}, {width}", "j, i0") if turned else (f"{width}, {depth}", "i0, j")
    text = (
        f"r0[1, t, {depth}] {word}\nr1[{weight}] {word}\nr2[{width}] {word}\n"
        f"r3[i0 < {depth}] = r0[0, t, i0] * 2.0\nr4[i0 < {width}] = sum[j < {depth}] r3[j] * r1[{index}]\n"
        f"r5[i0 < {width}] = tanh(r4[i0]) + r2[i0]\n"
        f"return r5[1, t, {width}] {word}, r4[t, {width}], r5[t, {width}] {word}, r3[1, t, {depth}] {word}"
    )
    shapes = (1, tokens, depth), (depth, width) if turned else (width, depth), (width,)
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    given[1] /= depth**0.5
    wanted = reference(parse(text), [t.double() for t in given])
    for multiplier in multipliers(tokens):
        found = computed(text, given, multiplier)
        assert [t.dtype for t in found] == [dtype, torch.float32, dtype, dtype]
        for one, other in zip(found, wanted, strict=True):
            own = 1e-5 if one.dtype == torch.float32 else 5e-3
            rounding = own if multiplier == run.OURS else 1e-2
            assert (one.double() - other).abs().max() < rounding * other.abs().max()


def integer_product(depth: int, width: int, kind: str, dtype: str) -> str:
    """A product with integers: as they are, [in, out], or with scales, or with scales and zeros, for each
    output or for each 32 inputs."""
    group = 32 if "32" in kind else depth
    place = "0" if group == depth else f"j // {group}"
    element = "float(r1[j, i0])" if kind == "turned" else "float(r1[i0, j])"
    given = [
        f"r0[1, t, {depth}]",
        f"r1[{f'{depth}, {width}' if kind == 'turned' else f'{width}, {depth}'}] {dtype}",
    ]
    if "scales" in kind:
        given.append(f"r2[{width}, {depth // group}]")
        if "zeros" in kind:
            given.append(f"r3[{width}, {depth // group}] {'int32' if dtype == 'uint8' else dtype}")
            element = f"({element} - float(r3[i0, {place}]))"
        element = f"{element} * r2[i0, {place}]"
    x, y = len(given), len(given) + 1
    made = [
        f"r{x}[i0 < {depth}] = r0[0, t, i0] * 0.0005",
        f"r{y}[i0 < {width}] = sum[j < {depth}] r{x}[j] * ({element})",
        f"r{y + 1}[i0 < {width}] = max(r{y}[i0], 0.0) + 1.0",
        f"return r{y + 1}[1, t, {width}], r{y}[t, {width}]",
    ]
    return "\n".join([*given, *made])


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 32, 33, 600])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("kind", ["plain", "turned", "scales", "scales and zeros"])
@pytest.mark.parametrize(("depth", "width"), [(37, 53), (192, 129)])
def test_products_with_integers(depth: int, width: int, kind: str, dtype: str, tokens: int) -> None:
    text = integer_product(depth, width, kind, dtype)
    assert parse(text).product(len(parse(text).given) + 1) is not None
    check(text, tokens)


@pytest.mark.parametrize("tokens", [1, 5, 33, 600])
@pytest.mark.parametrize("kind", ["scales by 32", "scales and zeros by 32"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_products_with_groups_of_integers(dtype: str, kind: str, tokens: int) -> None:
    text = integer_product(576, 53, kind, dtype)
    found = parse(text).scales(len(parse(text).given) + 1)
    assert found is not None and found.group == 32
    check(text, tokens)


PACKED = ("low first by 1", "high first by 1 less 8", "low first by 1 signed", "high first by 32",
          "low first by 32 signed less -3", "low first by 96 less 8")  # fmt: skip


def packed_product(words: str, depth: int, width: int, kind: str, group: int) -> str:
    text = integer_product(depth, width, kind + " by 32" * (group < depth), f"int4 {words}")
    return text.replace(" int4 " + words, " int8").replace(" int8", f" int4 {words}", 1).replace(
        "// 32", f"// {group}").replace(f", {depth // 32}]", f", {depth // group}]")  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 9, 32, 33, 600])
@pytest.mark.parametrize("words", PACKED)
@pytest.mark.parametrize("kind", ["plain", "scales", "scales and zeros"])
@pytest.mark.parametrize("width", [53, 129])
def test_products_with_packed_integers(words: str, width: int, kind: str, tokens: int) -> None:
    text = packed_product(words, 192, width, kind, 192)
    program = parse(text)
    assert program.product(len(program.given) + 1) is not None and str(program.given[1].packed) == words
    check(text, tokens)


@pytest.mark.parametrize("tokens", [1, 5, 8, 33, 600])
@pytest.mark.parametrize(
    ("words", "group"), [(w, g) for w in PACKED for g in (32, 64, 96) if Packed.of(w).splits(576, g, GROUP)]
)
@pytest.mark.parametrize("kind", ["scales", "scales and zeros"])
def test_products_with_groups_of_packed_integers(words: str, group: int, kind: str, tokens: int) -> None:
    text = packed_product(words, 576, 53, kind, group)  # several parts of the depth, of whole runs
    found = parse(text).scales(len(parse(text).given) + 1)
    assert found is not None and found.group == group
    check(text, tokens)


@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("words", ["low first by 1", "high first by 37 less 8"])
def test_products_with_packed_rows_that_are_no_whole_vectors(words: str, tokens: int) -> None:
    check(packed_product(words, 74, 41, "scales and zeros", 74), tokens)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_packed_integers_are_read_in_containers_of_any_size(dtype: torch.dtype) -> None:
    text = packed_product("low first by 1", 192, 53, "scales", 64)
    given = [torch.randn(1, 3, 192), integers(parse(text).given[1], torch.Generator().manual_seed(0)),
             torch.rand(53, 3)]  # fmt: skip
    (wanted,), (found,) = (
        run.Tokens().run(text.replace(", r4[t, 53]", ""), [given[0], bytes_, given[2]]) or []
        for bytes_ in (given[1], given[1].view(dtype))
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("words", "group"), [
    ("low first by 1", 16), ("low first by 8", 192), ("low first by 32", 48), ("low first by 32", 96),
    ("low first by 1 of outputs", 192),
])  # fmt: skip
def test_packed_integers_that_are_no_whole_vectors_are_left_to_pytorch(words: str, group: int) -> None:
    text = packed_product(words, 192, 52, "scales", group)
    assert parse(text).scales(4) == (2, None, group)
    assert run.Tokens().source(parse(text)) == ""


def test_groups_that_are_no_whole_vectors_are_left_to_pytorch() -> None:
    text = (
        integer_product(64, 40, "scales by 32", "int8")
        .replace("// 32", "// 8")
        .replace("r2[40, 2]", "r2[40, 8]")
    )
    assert parse(text).scales(4) == (2, None, 8)
    assert run.Tokens().source(parse(text)) == ""


def test_integers_of_another_dtype_are_not_read() -> None:
    text = integer_product(64, 40, "plain", "int8")
    given = [torch.randn(1, 3, 64), torch.ones(40, 64)]
    assert run.Tokens().run(text, given) is None and run.Tokens().link(text, given) is None


MOVED = """
r0[2, 6, t]
r1[t, 2, 5]
r2[i0 < 12] = r0[i0 // 6, i0 % 6, t] + 1.0
r3[i0 < 17] = where(i0 < 12, r2[i0], r1[t, 1, i0 - 12])
r4[i0 < 2, i1 < 6] = where(i0 < 1, r2[i1 + 6], -r0[0, i1, t])
r5[] = sum[j < 12] r2[j] * r2[j]
r6[i0 < 2] = amax[j < 6] r4[i0, j]
return r3[1, 17, t], r4[2, t, 6], r6[t, 2], r5[t]
"""
GATED = """
r0[t, 24]
r1[40, 24]
r2[40, 24]
r3[24, 40]
r4[i0 < 24] = r0[t, i0] * 1.0
r5[i0 < 40] = sum[j < 24] r4[j] * r1[i0, j]
r6[i0 < 40] = sum[j < 24] r4[j] * r2[i0, j]
r7[i0 < 40] = r5[i0] * sigmoid(r5[i0]) * r6[i0]
r8[i0 < 24] = sum[j < 40] r7[j] * r3[i0, j]
r9[i0 < 24] = r8[i0] + r0[t, i0]
return r9[t, 24]
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 3, 32, 33, 512, 1100])
@pytest.mark.parametrize("text", [MOVED, GATED])
def test_selections_digits_folds_and_gates(text: str, tokens: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(text.strip(), tokens)
    finally:
        torch.set_num_threads(before)


NORM = """
r0[1, t, 96]
r1[96]
r2[96, 200]
r3[] = sum[j < 96] r0[0, t, j] * r0[0, t, j]
r4[i0 < 96] = r0[0, t, i0] * rsqrt(r3[] / 96.0 + 1e-05) * r1[i0]
r5[i0 < 200] = sum[j < 96] r4[j] * r2[j, i0]
r6[i0 < 200] = r5[i0] * sigmoid(r5[i0])
return r6[1, t, 200]
"""


def test_what_a_loop_does_not_change_is_computed_before_it() -> None:
    check(NORM.strip(), 5)
    source = write(NORM.strip())
    body = source[source.index("static void tokens_0") : source.index("static void follow_1_0")]
    root, loop = body.index("rsqrt_("), body.index("for (int64_t i0")
    assert root < loop and "v3[t]" not in body[loop:]


@pytest.mark.parametrize("text", [MOVED, GATED, NORM])
def test_values_that_are_needed_in_the_same_phase_lie_apart(text: str) -> None:
    program = parse(text.strip())
    order = schedule.phases(program)
    sizes = {len(program.given) + n: 10 + n for n in range(len(program.definitions))}
    places, total = schedule.arranged(program, sizes)
    needed = [set[int]() for _ in order] + [{r.number for r in program.results}]
    for phase, here in zip(order, needed, strict=False):
        for number in [*phase.definitions, *(n for g in phase.groups for n in (*g.products, *g.following))]:
            made = program.definition(number)
            assert made is not None
            here |= {number, *(n for n in made.reads if n in sizes)}
    spans = {n: {at for at, here in enumerate(needed) if n in here} for n in sizes}
    for one, other in itertools.combinations(sizes, 2):
        first, second = (range(min(spans[n]), max(spans[n]) + 1) for n in (one, other))
        if set(first) & set(second):
            assert places[one] + sizes[one] <= places[other] or places[other] + sizes[other] <= places[one]
    assert all(0 <= places[n] <= total - sizes[n] for n in sizes)


def test_values_that_are_not_needed_together_share_memory() -> None:
    program = parse(NORM.strip())
    _, total = schedule.arranged(program, {3: 1, 4: 96, 5: 200, 6: 200})
    assert total == 200 + 200 + 96


def test_programs_share_the_code_of_products_whose_weights_lie_alike() -> None:
    def kinds(depth: int, width: int, turned: bool = False) -> list[str]:
        return [kind.source for kind in kinds_of_products(parse(product(depth, width, turned)))]

    assert kinds(64, 48) == kinds(64, 40), "how many outputs there are is an argument"
    assert kinds(64, 48) != kinds(48, 48) and kinds(64, 48) != kinds(64, 48, turned=True)
    assert "product_of(" not in write(product(64, 48, False)).split(f"{SHARED_END}tokens.h")[1]


def test_products_that_are_gated_are_computed_together() -> None:
    (group,) = next(p for p in schedule.phases(parse(GATED)) if p.groups).groups
    assert (group.products, group.following) == ([5, 6], [7])


@pytest.mark.parametrize("tokens", [3, 40])
def test_tensors_are_read_where_they_lie(tokens: int) -> None:
    x = torch.randn(tokens, 6, 4)[:, :, ::2].permute(2, 1, 0)
    wide = torch.randn(tokens, 9, 2)[:, 2:7].transpose(1, 2)
    check(MOVED.strip(), tokens, [x, wide])
    weight = torch.randn(1, 24).expand(40, 24)
    check(GATED.strip(), tokens, [torch.randn(24, tokens).T / 5, weight / 5, torch.randn(24, 40).T / 5,
                                  torch.randn(40, 24).T / 5])  # fmt: skip


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tokens", [2, 40])
def test_nan_and_infinity_go_through(special: float, tokens: int) -> None:
    text = "r0[t, 20]\nr1[i0 < 20] = r0[t, i0] * 1.0\nr2[] = amax[j < 20] r1[j]\nr3[] = sum[j < 20] r1[j]\n"
    text += "r4[i0 < 20] = where(r1[i0] > 0, r1[i0], exp(r1[i0]))\nreturn r2[t], r3[t], r4[t, 20]"
    x = torch.randn(tokens, 20)
    x[1, 7] = special
    found, wanted = run.Tokens().run(text, [x]), reference(parse(text), [x])
    assert found is not None
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("tokens", [3, 40, 600])
def test_a_value_may_be_returned_in_two_shapes(tokens: int) -> None:
    check("r0[t, 6]\nr1[i0 < 6] = r0[t, i0] * 2.0\nreturn r1[1, t, 6], r1[6, 1, t]", tokens)
