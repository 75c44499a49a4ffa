"""What the tests in the interpreter share: operands, programs, and comparisons with the reference."""

from collections.abc import Sequence

import torch
from conformance.paging import Paged
from known_good import check
from torch import Tensor

from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import kernels

SMALL = Forward(Blocks(32, 16))
FEW_ROWS = Blocks(16, 16)
REFERENCE = kernels.KERNELS["reference"]
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 1e-5}, torch.float16: {"atol": 2e-3, "rtol": 2e-3}}
Results = tuple[Tensor, Tensor]


def operands(
    B: int = 2, Hq: int = 2, Hkv: int = 2, Sq: int = 40, Skv: int = 40, D: int = 16, Dv: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    torch.manual_seed(B + Hq + Sq + Skv + D)
    shapes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


def agree(
    text: str, tensors: tuple[Tensor, Tensor, Tensor], reads: Sequence[Tensor] = (),
    sizes: Sequence[int] = (), kernel: Forward = SMALL, needed: bool = False,
) -> Results:  # fmt: skip
    """Assert that the kernel gives the reference's output, NaN for NaN, and its log-sum-exp. Returns them if
    they are `needed`."""
    program = parse(text)

    def compare(found: Results) -> None:
        wanted = REFERENCE.forward(program, tensors, reads, sizes)
        tolerance = TOLERANCE[tensors[0].dtype]
        torch.testing.assert_close(found[0], wanted[0], equal_nan=True, **tolerance)
        finite = wanted[1].isfinite()
        torch.testing.assert_close(found[1][finite], wanted[1][finite], **tolerance)

    return check(lambda: kernel.forward(program, tensors, reads, sizes), compare, needed)


def bias(*shape: int) -> Tensor:
    return torch.linspace(-2, 2, torch.Size(shape).numel()).sin().view(shape)


DOCUMENTS = torch.arange(160).view(2, 80) // 23
LENGTHS = torch.tensor([17, 66])
LISTED = [
    ("keep q - k < 9 and k <= q", ()),
    ("keep q - k < 9", ()),
    ("s = 0.3 * dot + r0[h]; keep abs(q - k) < 1 + 30 * h", (bias(2),)),
    ("keep r0[b, q] == r0[b, k]", (DOCUMENTS,)),
    ("s = 0.2 * dot; keep r0[b, q] == r0[b, k]; keep k <= q", (DOCUMENTS,)),
    ("keep k < r0[b] and q < r0[b]", (LENGTHS,)),
    ("keep k <= q or k < r0[b]; sink r1[h]", (LENGTHS, bias(2))),
    ("keep r0[b, k]; keep k % 3 > 0; p = p * 2", (torch.arange(160).view(2, 80) % 80 < 41,)),
    ("keep r0[b, h, q, k]; keep k >= q - 40", (torch.rand(2, 2, 80, 80) < 0.8,)),
    ("keep k <= q else s - 2; keep r0[b, k]", (torch.arange(160).view(2, 80) % 80 < 41,)),
]


def over_pages(
    text: str, lengths: Sequence[tuple[int, int]], heads: tuple[int, int], widths: tuple[int, int],
    splits: int | None, ring: int = 0, latent: bool = False, dtype: torch.dtype = torch.float32,
    page: int = 3, blocks: Blocks = FEW_ROWS,
) -> None:  # fmt: skip
    """Assert that new tokens over pages get what they get in whole sequences, in float64, and that their
    log-sum-exps are those. `page`: tokens of a page; 0: each row has one page."""
    g = torch.Generator().manual_seed(len(lengths) + sum(widths))
    (hq, hkv), (d, dv) = heads, widths
    total, rows = max(h + n for h, n in lengths), len(lengths)
    q = torch.randn(rows, hq, total, d, generator=g).to(dtype)
    k = torch.randn(rows, hkv, total, d, generator=g).to(dtype)
    v = k[..., :dv] if latent else torch.randn(rows, hkv, total, dv, generator=g).to(dtype)
    reads = [torch.randn(hq, generator=g).to(dtype), torch.randint(0, 2, (rows, total), generator=g)]
    paged = Paged(k, v, lengths, page or ring or total, ring, latent)
    program = parse(text)
    kernel = Decode(blocks, splits)
    asked = paged.packed(q)
    sums = torch.full(asked.shape[:3], 7.0)

    def run() -> Tensor:
        found = kernel.attend(program, asked, paged.new, paged.pages, reads, (), paged.rows, lse=sums)
        assert found is not None
        return found

    def compare(found: Tensor) -> None:
        exact = [r.double() if r.is_floating_point() else r for r in reads]
        results = REFERENCE.forward(program, (q.double(), k.double(), v.double()), exact, ())
        wanted, wanted_sums = paged.packed(results[0]), paged.packed(results[1][..., None]).squeeze(-1)
        tolerance = {torch.float32: 3e-5, torch.float16: 5e-3}[dtype]
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        wanted_sums = wanted_sums.nan_to_num(-torch.inf, neginf=-torch.inf)  # a row without keys
        torch.testing.assert_close(sums.double(), wanted_sums, rtol=tolerance, atol=tolerance)

    check(run, compare)


def compare_gradients(
    text: str, tensors: tuple[Tensor, Tensor, Tensor], reads: list[Tensor], sizes: Sequence[int],
    kernel: Forward = SMALL, tolerance: float = 2e-4, needed: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """Assert that a kernel's own gradients are those of the reference in float64, NaN for NaN."""
    program = parse(text)
    results = REFERENCE.forward(program, tensors, reads, sizes)
    grads = torch.randn_like(results[0]), 0.3 * torch.randn_like(results[1])
    assert kernel._plan_backward(program, tensors, reads, sizes) is not None, "it has kernels of its own"

    def compare(found: list[Tensor | None]) -> None:
        q, k, v, g, g_lse, *others = (
            t.double() if t.is_floating_point() else t for t in (*tensors, *grads, *reads)
        )
        exact = REFERENCE.forward(program, (q, k, v), others, sizes)
        wanted = REFERENCE.backward(program, (q, k, v), others, sizes, exact, (g, g_lse))
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                scale = max(1.0, theirs.nan_to_num().abs().amax().item())
                close = {"rtol": tolerance, "atol": tolerance * scale, "equal_nan": True}
                torch.testing.assert_close(mine.double(), theirs, **close)

    return check(lambda: kernel.backward(program, tensors, reads, sizes, results, grads), compare, needed)


def quarters(tensor: Tensor) -> Tensor:
    return tensor.mul(4).round().div(4)
