"""The Triton kernels on a GPU, at the sizes of models, against the reference in float64.

`pytest -m gpu` runs them. On a machine that has pytest but not what the other tests need:

    PYTHONPATH=. pytest --noconftest -m gpu tests/codegen/test_triton_gpu.py -k programs

and so on with other words (widths, lengths, pages): most of the time is compilation, which is kept
for the next run. The bound: in the mean over a tensor, twice the rounding of its dtype; nowhere more
than that of the largest element.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import attngraph.codegen
from attngraph.codegen.triton import attempts, tuning, visits
from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import attention as ops
from attngraph.ir.ops import kernels
from attngraph.ir.ops.cached_attention import Rows
from attngraph.ir.ops.kernels import Operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
]
DEVICE, LENGTH, LONG = "cuda", 1031, 1 << 16
HALVES = [torch.bfloat16, torch.float16]
REFERENCE = kernels.KERNELS["reference"]
assert attngraph.codegen is not None


@pytest.fixture(autouse=True)
def no_attempt_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not run is an error here, not a reason to try others."""

    def fail(*said: object) -> None:
        raise AssertionError(said)

    monkeypatch.setattr(attempts._log, "warning", fail)
    torch.manual_seed(0)


def operands(
    dtype: torch.dtype, B: int = 2, Hq: int = 8, Hkv: int = 2, Sq: int = LENGTH, Skv: int = LENGTH,
    D: int = 64, Dv: int = 64,
) -> Operands:  # fmt: skip
    shapes = (B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv)
    q, k, v = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
    return q, k, v


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    eps = max(torch.finfo(dtype).eps, 1e-5)  # sums in float32 are taken in another order
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.double().nan_to_num(), wanted.double().nan_to_num()
    error, most = (found - wanted).abs(), wanted.abs().amax()
    assert error.norm() <= 2 * eps * wanted.norm() + 1e-6
    assert error.amax() <= 4 * eps * most + 1e-6


def double(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def compare(
    text: str, tensors: Operands, reads: Sequence[Tensor] = (), sizes: Sequence[int] = (),
    kernel: Forward | None = None,
) -> None:  # fmt: skip
    """Output, log-sum-exp and gradients."""
    program, kernel, dtype = parse(text), kernel or Forward(), tensors[0].dtype
    found = kernel.forward(program, tensors, reads, sizes)
    q, k, v = double(tensors)
    wanted = REFERENCE.forward(program, (q, k, v), double(reads), sizes)
    close(found[0], wanted[0], dtype)
    seen = wanted[1].isfinite()  # a row that sees no key has no log-sum-exp
    close(found[1][seen], wanted[1][seen], torch.float16)
    grad = torch.randn_like(found[0])
    assert kernel._plan_backward(program, tensors, reads, sizes) is not None
    mine = kernel.backward(program, tensors, reads, sizes, found, (grad, torch.zeros_like(found[1])))
    rounded = rounding_of_delta(grad.double(), wanted[0], found[0])
    theirs = REFERENCE.backward(program, (q, k, v), double(reads), sizes, wanted, (grad.double(), rounded))
    for one, other in zip(mine, theirs, strict=True):
        if one is not None and other is not None:
            close(one, other, dtype)


def rounding_of_delta(grad: Tensor, wanted: Tensor, found: Tensor) -> Tensor:
    """The gradient of log-sum-exps by which exact gradients are those that follow from a rounded output.

    Kernels take delta = rowsum(grad * out) from the output, which was rounded. Sums over many pairs may
    cancel to any degree, and what rounding leaves of them does not."""
    return (grad * (wanted - found.double())).nan_to_num().sum(-1)


def reads_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


PROGRAMS: dict[str, tuple[str, Callable[[], list[Tensor]], list[int]]] = {
    "full": ("s = 0.125 * dot", list, []),
    "causal": ("s = 0.125 * dot; keep k <= q", list, []),
    "window": ("s = 0.125 * dot; keep q - k < 200 and k <= q", list, []),
    "softcap": ("s = 20.0 * tanh(dot / 160.0); keep k <= q", list, []),
    "fill": ("s = 0.125 * dot; keep k <= q else -10000.0", list, []),
    "bias": ("s = 0.125 * dot + r0[h, q, k]; keep k <= q", lambda: reads_of((8, LENGTH, LENGTH)), []),
    "distance": (
        "s = 0.125 * dot + r0[h, k - q + n0]", lambda: reads_of((8, 2 * LENGTH - 1)), [LENGTH - 1],
    ),
    "slopes": ("s = 0.125 * dot + 0.01 * r0[h] * (k - q); keep k <= q", lambda: reads_of((8,)), []),
    "sink": ("s = 0.125 * dot; keep k <= q; sink r0[h]", lambda: reads_of((8,)), []),
    "per key": ("s = 0.125 * dot + r0[b, k]", lambda: reads_of((2, LENGTH)), []),
    "padding": (
        "s = 0.125 * dot; keep k < r0[b]", lambda: [torch.tensor([LENGTH // 3, LENGTH], device=DEVICE)], [],
    ),
    "documents": (
        "s = 0.125 * dot; keep r0[b, q] == r0[b, k]; keep k <= q",
        lambda: [(torch.arange(2 * LENGTH, device=DEVICE) // 150).view(2, LENGTH)], [],
    ),
    "rows without keys": ("s = 0.125 * dot; keep k <= q - 5", list, []),
    "dropout": (
        "s = 0.125 * dot; p = where(random(r0[], b, h, q, k) < 0.1, 0.0, p / 0.9)",
        lambda: [torch.tensor(7, device=DEVICE)], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_agree(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "WORTH", 1)
    text, reads, sizes = PROGRAMS[name]
    compare(text, operands(dtype), reads(), sizes)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("widths", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", ["causal", "softcap", "distance"])
def test_widths_agree(name: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    text, reads, sizes = PROGRAMS[name]
    compare(text, operands(dtype, D=widths[0], Dv=widths[1]), reads(), sizes)


def test_a_call_gives_the_same_every_time_and_in_a_graph_that_is_recorded() -> None:
    program, kernel = parse(PROGRAMS["causal"][0]), Forward()
    tensors = operands(torch.bfloat16, Sq=4096, Skv=4096, D=128, Dv=128)
    first = kernel.forward(program, tensors, [], [])
    for _ in range(50):
        again = kernel.forward(program, tensors, [], [])
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = kernel.forward(program, tensors, [], [])
    recorded[0].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first[0], recorded[0])


# --- other calls ---


@pytest.mark.parametrize("lengths", [(1, LENGTH), (LENGTH, 7), (64, 128), (33, 1000)])
def test_lengths_agree(lengths: tuple[int, int]) -> None:
    tensors = operands(torch.bfloat16, Sq=lengths[0], Skv=lengths[1])
    compare("s = 0.125 * dot; keep k <= q + n0", tensors, [], [max(0, lengths[1] - lengths[0])])


def test_tensors_may_lie_in_memory_as_they_like() -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in operands(torch.bfloat16))
    k = k.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    v = torch.cat([v, v], -1)[..., ::2]
    bias = torch.randn(LENGTH, 2 * LENGTH, 8, device=DEVICE).permute(2, 0, 1)[:, :, ::2]
    compare("s = 0.125 * dot + r0[h, q, k]; keep k <= q", (q, k, v), [bias])


def test_long_sequences_agree_in_their_last_rows() -> None:
    q, k, v = operands(torch.bfloat16, 1, 2, 1, LONG, LONG)
    for mask in ("keep k <= q + n0", "keep k <= q + n0 and q + n0 - k < 4000"):
        out, lse = Forward().forward(parse("s = 0.125 * dot; " + mask), (q, k, v), [], [0])
        few = (q[:, :, -64:].double(), k.double(), v.double())
        wanted = REFERENCE.forward(parse("s = 0.125 * dot; " + mask), few, [], [LONG - 64])
        close(out[:, :, -64:], wanted[0], torch.bfloat16)
        close(lse[:, :, -64:], wanted[1], torch.float16)


def test_gradients_of_long_sequences_take_memory_that_grows_with_their_length() -> None:
    if DEVICE != "cuda":
        pytest.skip("counts the memory of a GPU")
    spent = []
    for length in (LONG // 8, LONG // 4):
        q, k, v = (t.requires_grad_() for t in operands(torch.bfloat16, 1, 4, 4, length, length))
        table = torch.randn(4, 2 * length - 1, device=DEVICE, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        text = "s = 0.125 * dot + r0[h, k - q + n0]; keep k <= q"
        out = ops.attention(q, k, v, text, table, sizes=[length - 1], kernel="triton.forward")
        out.float().square().sum().backward()
        assert bool(table.grad is not None and table.grad.isfinite().all())
        spent.append(torch.cuda.max_memory_allocated())
    assert spent[1] <= 3 * spent[0]


def test_the_same_call_gives_the_same_gradients() -> None:
    program, tensors = parse(PROGRAMS["distance"][0]), operands(torch.bfloat16)
    reads, sizes = PROGRAMS["distance"][1](), PROGRAMS["distance"][2]
    kernel = Forward()
    results = kernel.forward(program, tensors, reads, sizes)
    grads = torch.randn_like(results[0]), torch.zeros_like(results[1])
    first, second = (kernel.backward(program, tensors, reads, sizes, results, grads) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_lists_of_tiles_are_found_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cuda":
        pytest.skip("only a GPU can be waited for")
    monkeypatch.setattr(visits, "WORTH", 1)
    program, tensors = parse(PROGRAMS["documents"][0]), operands(torch.bfloat16)
    kernel = Forward()
    kernel.forward(program, tensors, PROGRAMS["documents"][1](), [])
    others = PROGRAMS["documents"][1]()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.forward(program, tensors, others, [])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("heads", "widths", "latent"),
    [
        ((8, 8), (64, 64), False), ((32, 8), (128, 128), False), ((8, 1), (80, 80), False),
        ((16, 1), (192, 128), False), ((16, 1), (576, 512), True), ((128, 1), (576, 512), True),
    ],
)  # fmt: skip
def test_new_tokens_over_pages_agree(
    heads: tuple[int, int], widths: tuple[int, int], latent: bool, dtype: torch.dtype
) -> None:
    """Rows of several lengths, each with its newest token or few; keys in pages out of order."""
    (hq, hkv), (d, dv), page = heads, widths, 16
    held, new = [1000, 37, 0, 4000], [1, 3, 2, 1]
    rows, total = len(held), max(held) + max(new)
    q = torch.randn(rows, hq, total, d, device=DEVICE).to(dtype)
    k = torch.randn(rows, hkv, total, d, device=DEVICE).to(dtype)
    v = k[..., :dv] if latent else torch.randn(rows, hkv, total, dv, device=DEVICE).to(dtype)
    columns = -(-total // page)
    table = torch.randperm(rows * columns, device=DEVICE).view(rows, columns)

    def paged(whole: Tensor) -> Tensor:
        missing = torch.nn.functional.pad(whole, (0, 0, 0, columns * page - total))
        split = missing.view(rows, hkv, columns, page, -1).transpose(1, 2).flatten(0, 1)
        pages = torch.empty_like(split)
        pages[table.flatten()] = split
        return pages

    def packed(whole: Tensor) -> Tensor:
        parts = [whole[r, :, h : h + n] for r, (h, n) in enumerate(zip(held, new, strict=True))]
        return torch.cat(parts, 1).unsqueeze(0)

    k_pages, k_new = paged(k), packed(k)
    v_pages, v_new = (k_pages[..., :dv], k_new[..., :dv]) if latent else (paged(v), packed(v))
    places = Rows(
        table, torch.tensor([0, *new], device=DEVICE).cumsum(0),
        torch.tensor(held, device=DEVICE), torch.tensor(held, device=DEVICE),
    )  # fmt: skip
    program = parse(f"s = {d**-0.5} * dot; keep k <= q")
    found = Decode().attend(program, packed(q), (k_new, v_new), (k_pages, v_pages), [], (), places)
    assert found is not None
    wanted = []
    for row, (h, n) in enumerate(zip(held, new, strict=True)):
        one = tuple(t[row : row + 1, :, : h + n].double() for t in (k, v))
        late = parse(f"s = {d**-0.5} * dot; keep k <= q + n0")
        wanted.append(REFERENCE.forward(late, (q[row : row + 1, :, h : h + n].double(), *one), [], [h])[0])
    close(found, torch.cat(wanted, 2), dtype)


def test_other_block_sizes_agree_and_can_be_measured(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for blocks in (Blocks(64, 64, 4, 2), Blocks(128, 32, 8, 3), Blocks(32, 128, 4, 1)):
        compare(PROGRAMS["causal"][0], operands(torch.bfloat16), kernel=Forward(blocks))
    monkeypatch.setattr(tuning, "choices", lambda *_: iter([Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3)]))
    monkeypatch.setattr(tuning.tuned, "_own", lambda name: tmp_path_factory.mktemp("tuned") / "table.json")
    monkeypatch.setattr(
        tuning, "decode_choices", lambda *_: iter([Blocks(16, 64, 4, 2), Blocks(16, 32, 4, 3)])
    )
    found = attngraph.codegen.triton.tune(PROGRAMS["causal"][0], operands(torch.bfloat16), gradients=True)
    assert len(found) == 2
    q, k, v = (t[:1, :, :2] for t in operands(torch.bfloat16))
    pages = torch.randn(8, 2, 256, 64, device=DEVICE).bfloat16()
    held = torch.full((2,), 1000, device=DEVICE)
    rows = (torch.arange(8, device=DEVICE).view(2, 4), torch.arange(3, device=DEVICE), held, held)
    decoding = attngraph.codegen.triton.tune(
        PROGRAMS["causal"][0], (q, k, v), cache=((pages, pages.clone()), rows)
    )
    assert len(decoding) == 1
