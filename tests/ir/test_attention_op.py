"""The op `attngraph::attention`: registration (schema, fake, autograd), gradients in float64, what it says
when its operands do not fit, and how it may be divided.
"""

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import kernels
from attngraph.ir.ops.shardings import read_dims

op = torch.ops.attngraph.attention.default


def operands(
    B: int = 2, Hq: int = 4, Hkv: int = 2, Sq: int = 5, Skv: int = 5, D: int = 4, Dv: int = 4,
    dtype: torch.dtype = torch.float64, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v


def bias(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


PROGRAMS = {
    "plain": ("", ()),
    "causal": ("s = 0.5 * dot; keep k <= q", ()),
    "softly causal": ("s = 0.5 * dot; keep k <= q else -1e9", ()),
    "leaky": ("keep k <= q else -5", ()),
    "softcap": ("s = 3 * tanh(dot / 3)", ()),
    "window of n0": ("keep k <= q and k > q - n0", ()),
    "bias": ("s = dot + r0[h, q, k]", (bias(4, 5, 5),)),
    "relative": ("s = dot + r0[h, k - q + 4]", (bias(4, 9),)),
    "padding": ("keep r0[b, k]", (torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool),)),
    "documents": ("keep r0[b, q] == r0[b, k]", (torch.tensor([[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]]),)),
    "sink": ("keep k <= q; sink r0[h]", (bias(4),)),
    "weights": ("keep k <= q; p = p * r0[h]", (bias(4),)),
    "dropout": ("p = where(0.2 <= random(n1, b, h, q, k), 1.25 * p, 0)", ()),
    "mixed reads": ("s = dot + r0[b, q, k] * r1[q]", (bias(2, 5, 5), torch.arange(5))),
}
SIZES = (3, 7)


@pytest.mark.parametrize("kernel", ["", "reference", "cpu.tiled"])
@pytest.mark.parametrize("name", ["plain", "causal", "bias", "padding", "sink", "dropout"])
def test_the_op_is_registered_as_torch_wants_it(name: str, kernel: str) -> None:
    program, reads = PROGRAMS[name]
    q, k, v = (t.requires_grad_() for t in operands())
    given = [r.clone().requires_grad_(r.is_floating_point()) for r in reads]
    torch.library.opcheck(op, (q, k, v, given, list(SIZES), program, kernel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [{}, {"Hq": 2}, {"Sq": 3, "Skv": 7}, {"Dv": 6}, {"B": 0}, {"Sq": 0}, {"Skv": 0}]
)
def test_the_fake_result_has_the_real_ones_shape_dtype_and_strides(
    dtype: torch.dtype, shape: dict[str, int]
) -> None:
    q, k, v = (t.requires_grad_() for t in operands(**shape, dtype=dtype))
    torch.library.opcheck(
        op, (q, k, v, [], [], "s = 0.5 * dot; keep k <= q"), test_utils=("test_schema", "test_faketensor")
    )


def test_the_op_traces_with_dynamic_sizes() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
            return attngraph.attention(
                q, k, v, "s = dot + r0[h]; keep k <= q + n0", table, sizes=(k.shape[2] - q.shape[2],)
            )

    q, k, v = operands()
    table = bias(4)
    auto = torch.export.Dim.AUTO
    dims = dict.fromkeys((0, 2), auto)
    exported = torch.export.export(
        Model(), (q, k, v, table), dynamic_shapes=(dims, dims, dims, None), strict=False
    )
    q, k, v = operands(B=3, Sq=7, Skv=7)
    expected = attngraph.attention(q, k, v, "s = dot + r0[h]; keep k <= q", table)
    torch.testing.assert_close(exported.module()(q, k, v, table), expected)


def test_the_op_compiles_with_dynamic_sizes_forward_and_backward() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngraph.attention(q, k, v, "keep k <= q and k > q - n0", sizes=(q.shape[2] - 1,)).sin().sum()

    compiled = torch.compile(run, backend="aot_eager", dynamic=True, fullgraph=True)
    for length in (5, 9):
        inputs = [t.requires_grad_() for t in operands(Sq=length, Skv=length)]
        grads = torch.autograd.grad(compiled(*inputs), inputs)
        for found, expected in zip(grads, torch.autograd.grad(run(*inputs), inputs), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", ["reference", "cpu.tiled"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_gradients_are_those_of_finite_differences(name: str, kernel: str) -> None:
    program, reads = PROGRAMS[name]
    q, k, v = (t.requires_grad_() for t in operands(Hq=4, Hkv=2, D=2, Dv=3))
    given = [r.clone().requires_grad_(r.is_floating_point()) for r in reads]
    floating = [r for r in given if r.requires_grad]

    def run(q: Tensor, k: Tensor, v: Tensor, *sources: Tensor) -> tuple[Tensor, Tensor]:
        rest = iter(sources)
        return op(
            q, k, v, [next(rest) if r.requires_grad else r for r in given], list(SIZES), program, kernel
        )

    assert torch.autograd.gradcheck(run, (q, k, v, *floating), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("program", ["", "s = 0.5 * dot; keep k <= q", "keep k <= q else -1e9"])
def test_gradients_of_the_flash_kernel_are_those_of_finite_differences(program: str) -> None:
    q, k, v = (t.requires_grad_() for t in operands(Sq=3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return op(q, k, v, [], [], program, "cpu.flash")

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)


def test_one_tensor_as_query_keys_and_values_has_one_gradient() -> None:
    x = operands(Hkv=4)[0].requires_grad_()
    once, again = (
        torch.autograd.grad(out.square().sum(), x, create_graph=more)[0]
        for out, more in (((x @ x.mT).softmax(-1) @ x, False), (attngraph.attention(x, x, x), True))
    )
    assert torch.allclose(once, again)
    assert torch.autograd.gradgradcheck(lambda t: attngraph.attention(t, t, t), (x,))


def test_the_log_sum_exp_includes_the_sink() -> None:
    q, k, v = operands(Hkv=4)
    _, lse = op(q, k, v, [], [], "sink 0.7", "")
    scores = torch.cat([q @ k.mT, torch.full((2, 4, 5, 1), 0.7, dtype=torch.float64)], -1)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    _, empty = op(q, k[:, :, :0], v[:, :, :0], [], [], "sink 0.7", "")
    torch.testing.assert_close(empty, torch.full((2, 4, 5), 0.7, dtype=torch.float64))


def test_with_no_keys_at_all_the_result_is_zero_whatever_the_operands_hold() -> None:
    q = torch.full((1, 1, 2000, 64), 60000.0, dtype=torch.float16)  # its sum is infinite in float16
    k = v = torch.ones(1, 1, 0, 64, dtype=torch.float16)
    for value in (q, torch.full_like(q, float("nan")), torch.full_like(q, float("inf"))):
        assert torch.equal(attngraph.attention(value, k, v, ""), torch.zeros_like(q))


WRONG = [
    ("q rank", {"q": (4, 5, 4)}, "", (), (), r"q must be \[batch, heads, tokens, width\]"),
    ("v rank", {"v": (2, 2, 5, 4, 1)}, "", (), (), r"v must be \[batch, heads, tokens, width\]"),
    ("batch of k", {"k": (3, 2, 5, 4)}, "", (), (), "batch sizes differ"),
    ("batch of v", {"v": (1, 2, 5, 4)}, "", (), (), "batch sizes differ"),
    ("width", {"k": (2, 2, 5, 3)}, "", (), (), "q and k differ in width"),
    ("kv heads", {"v": (2, 4, 5, 4)}, "", (), (), "differ in heads or tokens"),
    ("kv tokens", {"v": (2, 2, 6, 4)}, "", (), (), "differ in heads or tokens"),
    ("heads", {"q": (2, 3, 5, 4)}, "", (), (), "3 query heads cannot share 2"),
    ("no kv heads", {"k": (2, 0, 5, 4), "v": (2, 0, 5, 4)}, "", (), (), "cannot share 0"),
    ("missing read", {}, "s = dot + r1[h]", ((4,),), (), r"reads r1, but only 1 tensor\(s\)"),
    ("read rank", {}, "s = dot + r0[h, k]", ((4,),), (), r"reads r0 with 2 index\(es\)"),
    ("two ranks of one read", {}, "s = dot + r0[h] + r0[h, k]", ((4,),), (), "r0"),
    ("missing size", {}, "keep k < n1", (), (3,), r"names n1, but only 1 size\(s\)"),
    ("short read", {}, "s = dot + r0[k]", ((3,),), (), "r0"),
    ("short batch", {}, "keep r0[b, k] > 0", ((1, 5),), (), "r0"),
    ("number out of range", {}, "s = dot + r0[7]", ((3,),), (), "r0"),
]


@pytest.mark.parametrize(
    ("shapes", "program", "reads", "sizes", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
@pytest.mark.parametrize("kernel", ["", "reference", "cpu.tiled"])
def test_operands_that_do_not_fit_are_refused_by_name(
    shapes: dict[str, tuple[int, ...]], program: str, reads: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...], words: str, kernel: str,
) -> None:  # fmt: skip
    default = {"q": (2, 4, 5, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4)}
    q, k, v = (torch.randn(shapes.get(n, s)) for n, s in default.items())
    with pytest.raises((ValueError, IndexError), match=words):
        attngraph.attention(q, k, v, program, *(torch.randn(s) for s in reads), sizes=sizes, kernel=kernel)


def test_dtypes_and_devices_that_do_not_fit_are_refused() -> None:
    q, k, v = operands()
    for wrong in (
        (q.float(), k, v),
        (q, k, v.half()),
        (q.int(), k.int(), v.int()),
        (q, k, v.to(torch.complex128)),
    ):
        with pytest.raises(ValueError, match="one floating dtype"):
            attngraph.attention(*wrong)
    for wrong in ((q.to("meta"), k, v), (q, k, v.to("meta"))):
        with pytest.raises(ValueError, match="on one device"):
            attngraph.attention(*wrong)
    with pytest.raises(ValueError, match="on one device"):
        attngraph.attention(q, k, v, "s = dot + r0[h]", torch.zeros(4, device="meta"))


def test_a_program_that_does_not_parse_is_refused_before_anything_runs() -> None:
    with pytest.raises(attngraph.ProgramError, match="line 1, column 6"):
        attngraph.attention(*operands(), "keep ! k")


def test_an_unknown_kernel_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no kernel is called 'fast'; there are .*reference"):
        attngraph.attention(*operands(), "", kernel="fast")


def test_a_kernel_that_does_not_serve_the_program_refuses_when_asked_by_name() -> None:
    with pytest.raises(ValueError, match="plainly causal"):
        attngraph.attention(*operands(), "keep k < q", kernel="cpu.flash")


def test_a_parsed_program_is_accepted_as_well_as_its_text() -> None:
    q, k, v = operands()
    text = "keep k <= q"
    assert torch.equal(
        attngraph.attention(q, k, v, text), attngraph.attention(q, k, v, attngraph.parse(text))
    )


def test_the_choice_of_a_kernel_says_why_each_one_declined() -> None:
    with pytest.raises(ValueError, match="no kernel of cuda serves"):
        kernels.choose(attngraph.parse(""), operands(), "cuda")


@pytest.mark.parametrize("program", ["keep k <= q else -1e9", "s = 0.5 * dot + r0[h]; keep k <= q"])
@pytest.mark.parametrize("kernel", ["", "cpu.tiled", "reference"])
def test_autocast_changes_nothing_inside(program: str, kernel: str) -> None:
    """An op of ours is no op that autocast casts, so its answers and gradients are those of its operands'."""
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        operands = [torch.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3)]
        reads = [torch.randn(3, requires_grad=True)] if "r0" in program else []
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = attngraph.attention(*operands, program, *reads, kernel=kernel)
            out.square().sum().backward()
        found.append([out.detach(), *(t.grad for t in (*operands, *reads))])
    for plain, cast in zip(*found, strict=True):
        assert plain.dtype == cast.dtype
        assert torch.equal(plain, cast)


@pytest.mark.parametrize(
    "program, rows, heads",
    [
        ("s = dot; keep k <= q", [None], [None]),
        ("s = dot + r0[h, q]", [None], [0]),
        ("s = dot + r0[b, h, q, k]", [0], [1]),
        ("s = dot + r0[q, h] + r1[b]", [None, 0], [1, None]),
        ("s = dot + r0[h] * h", [None], None),  # the number itself
        ("s = dot + r0[h // 2]", [None], None),
        ("s = dot + r0[h + 1]", [None], None),
        ("s = dot + r0[h, q] + r0[q, k]", [None], None),  # both at the head and elsewhere
        ("s = dot + r0[r1[b]]", [None, 0], [None, None]),
        ("s = dot; keep k <= q + b", None, [None]),
    ],
)
def test_where_a_program_uses_rows_and_heads(
    program: str, rows: list[int | None] | None, heads: list[int | None] | None
) -> None:
    count = len(rows or heads or ())
    assert read_dims(parse(program), "b", count) == rows
    assert read_dims(parse(program), "h", count) == heads
