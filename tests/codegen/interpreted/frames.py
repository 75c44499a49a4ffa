"""What the tests in the interpreter share: operands, programs, and comparisons with the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import kernels
from attngraph.ir.ops.cached_attention import Rows

SMALL = Forward(Blocks(32, 16))
REFERENCE = kernels.KERNELS["reference"]
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
}
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
    sizes: Sequence[int] = (), kernel: Forward = SMALL,
) -> Results:  # fmt: skip
    """Assert that the kernel gives the reference's output, NaN for NaN, and its log-sum-exp."""
    program = parse(text)
    found = kernel.forward(program, tensors, reads, sizes)
    wanted = REFERENCE.forward(program, tensors, reads, sizes)
    tolerance = TOLERANCE[tensors[0].dtype]
    torch.testing.assert_close(found[0], wanted[0], equal_nan=True, **tolerance)
    finite = wanted[1].isfinite()
    torch.testing.assert_close(found[1][finite], wanted[1][finite], **tolerance)
    return found


def bias(*shape: int) -> Tensor:
    return torch.linspace(-2, 2, torch.Size(shape).numel()).sin().view(shape)


SEED = torch.tensor(1 << 40 | 9)
FUTURE = torch.ones(40, 40).triu(1) > 0
FIRST_BATCH_EMPTY = torch.arange(80).view(2, 40) >= 43

PROGRAMS = [
    ("", (), ()),
    ("s = dot / 4", (), ()),
    ("s = -0.5 * dot", (), ()),
    ("s = 0 * dot", (), ()),
    ("s = 0.25 * dot; keep k <= q", (), ()),
    ("keep k <= q and k > q - 7", (), ()),
    ("keep k < q", (), ()),
    ("keep k % 3 == 0 or k == q", (), ()),
    ("keep (k - q) % 3 != 1; keep (k - q) // 5 > -4", (), ()),
    ("keep not (k > q and q > 4)", (), ()),
    ("keep k <= q + 5", (), ()),
    ("keep k <= q - 5", (), ()),
    ("keep k <= q + n0", (), (3,)),
    ("keep k <= q - n0 and k < n1", (), (1, 30)),
    ("s = 0.25 * dot; keep k <= q else -1000000000.0", (), ()),
    ("keep k <= q else -3.4028234663852886e+38", (), ()),
    ("keep k <= q else -2.5", (), ()),
    ("keep k <= q else s - 3", (), ()),
    ("keep r0[b, k]; keep k <= q else -10000", (FIRST_BATCH_EMPTY,), ()),
    ("keep r0[b, k] else -3.4028234663852886e+38", (FIRST_BATCH_EMPTY,), ()),
    ("keep k <= q; s = s + r0[h, q, k]", (bias(2, 40, 40),), ()),
    ("s = s + r0[h, k - q + 127]", (bias(2, 255),), ()),
    ("s = s + r0[h] * (k - q); keep k <= q", (bias(2),), ()),
    ("s = s + r0[b, h, q, k]", (bias(2, 2, 40, 40).half(),), ()),
    ("s = s + r0[b, h, q, k]", (bias(2, 2, 40, 40).masked_fill(FUTURE, -torch.inf),), ()),
    ("s = s + where(r0[b, k], 0.0, -10000.0)", (FIRST_BATCH_EMPTY,), ()),
    ("keep r0[b, k]", (torch.arange(80).view(2, 40) % 3 > 0,), ()),
    ("keep r0[b, q] == r0[b, k] and k <= q", (torch.arange(80).view(2, 40) // 9,), ()),
    ("keep r0[b, k] > 0", (bias(2, 40).double(),), ()),
    ("keep k < r0[b]", (torch.tensor([17, 40], dtype=torch.int32),), ()),
    ("s = 50 * tanh(s / 50)", (), ()),
    ("s = 0.1 * dot; s = 2 * tanh(s / 2); keep k <= q", (), ()),
    ("s = 0.5 * s + tanh(dot)", (), ()),
    ("s = r0[k, q]", (bias(40, 40),), ()),
    ("s = 3", (), ()),
    ("sink r0[h]", (bias(2),), ()),
    ("s = dot / 3; sink 1 - r0[h]", (bias(2),), ()),
    ("s = 0.5 * dot; keep k < q; sink r0[h]", (bias(2),), ()),
    ("s = tanh(s); sink r0[b, q] + 1", (bias(2, 40),), ()),
    ("keep k < q; sink where(h == 0, -inf, 0.5)", (), ()),
    ("keep k <= q; p = where(random(r0[], b, h, q, k) < 0.3, 0.0, p / 0.7)", (SEED,), ()),
    ("p = p * r0[h]; p = where(k <= q, p, 0)", (bias(2),), ()),
    ("keep r0[b, k]; p = where(isnan(p), 0, p)", (FIRST_BATCH_EMPTY & (torch.arange(2) > 0)[:, None],), ()),
    ("keep k < q; p = where(not isnan(p), 2 * p - p / 4, 0.0)", (), ()),
]  # fmt: skip

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
) -> None:  # fmt: skip
    """Assert that new tokens over pages get what they get in whole sequences, in float64."""
    g = torch.Generator().manual_seed(len(lengths) + sum(widths))
    (hq, hkv), (d, dv), page = heads, widths, 3
    total, rows = max(h + n for h, n in lengths), len(lengths)
    q = torch.randn(rows, hq, total, d, generator=g).to(dtype)
    k = torch.randn(rows, hkv, total, d, generator=g).to(dtype)
    v = k[..., :dv] if latent else torch.randn(rows, hkv, total, dv, generator=g).to(dtype)
    reads = [torch.randn(hq, generator=g).to(dtype), torch.randint(0, 2, (rows, total), generator=g)]
    columns = -(-(ring or total) // page)
    table = torch.randperm(rows * columns, generator=g).view(rows, columns)
    pages = [torch.full((rows * columns, hkv, page, w), torch.nan, dtype=dtype) for w in widths]
    if latent:
        pages[1] = pages[0][..., :dv]
    for row, (held, _) in enumerate(lengths):
        for p in range(max(0, held - columns * page), held):
            slot = p % (columns * page)
            place = table[row, slot // page], slice(None), slot % page
            pages[0][place] = k[row, :, p]
            pages[1][place] = v[row, :, p]

    def packed(whole: Tensor) -> Tensor:
        return torch.cat([whole[r, :, h : h + n] for r, (h, n) in enumerate(lengths)], 1).unsqueeze(0)

    starts = torch.tensor([0, *[n for _, n in lengths]]).cumsum(0)
    held = torch.tensor([h for h, _ in lengths])
    new_k = packed(k)
    new = (new_k, new_k[..., :dv] if latent else packed(v))
    program = parse(text)
    kernel = Decode(Blocks(16, 16), splits)
    found = kernel.attend(
        program, packed(q), new, (pages[0], pages[1]), reads, (), Rows(table, starts, held, held)
    )  # fmt: skip
    assert found is not None
    exact = [r.double() if r.is_floating_point() else r for r in reads]
    wanted = packed(REFERENCE.forward(program, (q.double(), k.double(), v.double()), exact, ())[0])
    tolerance = {torch.float32: 3e-5, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def compare_gradients(
    text: str, tensors: tuple[Tensor, Tensor, Tensor], reads: list[Tensor], sizes: Sequence[int],
    kernel: Forward = SMALL, tolerance: float = 2e-4,
) -> list[Tensor | None]:  # fmt: skip
    """Assert that a kernel's own gradients are those of the reference in float64, NaN for NaN."""
    program = parse(text)
    results = REFERENCE.forward(program, tensors, reads, sizes)
    grads = torch.randn_like(results[0]), 0.3 * torch.randn_like(results[1])
    assert kernel._plan_backward(program, tensors, reads, sizes) is not None, "it has kernels of its own"
    found = kernel.backward(program, tensors, reads, sizes, results, grads)
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
    return found


def quarters(tensor: Tensor) -> Tensor:
    return tensor.mul(4).round().div(4)
