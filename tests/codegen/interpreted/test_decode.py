"""Attention over a cache against attention over whole sequences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance.paging import Paged
from frames import REFERENCE, over_pages

import attngraph
import attngraph.codegen
from attngraph.codegen.triton import decode, device
from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.plan import Blocks, DecodePlan
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.cached_attention import Rows, row_by_row
from attngraph.ir.ops.quantised import quantise
from attngraph.models.mla import MLAConfig, MLADecoder

DECODED = (
    "s = 5.0 * tanh(dot / 5.0); keep k <= q; sink r0[h]",
    "keep k <= q and q - k < 4",
    "keep k < 4 and q < 6 else -1e9; keep k <= q",
)


@pytest.mark.parametrize("text", DECODED)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", [0, 3, 8])
def test_new_tokens_over_pages(text: str, splits: int, page: int) -> None:
    ring = 8 if "q - k < 4" in text else 0
    over_pages(text, [(5, 1), (0, 3), (37, 2), (9, 1)], (4, 2), (16, 16), splits, ring, page=page)


@pytest.mark.parametrize(
    ("heads", "widths"), [((4, 4), (16, 16)), ((6, 1), (80, 80)), ((6, 1), (10, 24)), ((40, 1), (24, 10))]
)
def test_heads_of_a_group_and_widths_over_pages(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    over_pages("s = 0.3 * dot; keep k <= q", [(21, 1), (3, 4), (0, 1)], heads, widths, 2)


@pytest.mark.parametrize(
    ("widths", "dtype"),
    [
        ((24, 16), torch.float32),
        ((20, 13), torch.float32),
        ((16, 16), torch.float32),
        ((72, 64), torch.float16),
    ],
)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("page", [0, 3])
def test_latents_are_keys_and_values_at_once(
    widths: tuple[int, int], dtype: torch.dtype, splits: int, page: int
) -> None:
    rows = [(21, 1), (0, 2), (9, 3)]
    over_pages("s = 0.2 * dot; keep k <= q", rows, (20, 1), widths, splits, 0, True, dtype, page)


@pytest.mark.parametrize(
    "text", ["s = 0.2 * dot; keep k <= q", "s = tanh(0.2 * dot); keep k <= q; p = p * 2"]
)
@pytest.mark.parametrize("latent", [True, False])
def test_tiles_whose_columns_warp_groups_share_out(text: str, latent: bool) -> None:
    """A tile of 64 rows and eight warps, with a part of keys beside their values."""
    blocks, lengths = Blocks(64, 16, 8), [(20, 1), (40, 2), (0, 1)]
    over_pages(text, lengths, (40, 1), (24, 16), 2, latent=latent, blocks=blocks)
    over_pages(text, lengths, (40, 1), (24, 16), 1, latent=latent, blocks=blocks, page=0)


def test_a_row_that_brings_nothing_and_one_that_sees_nothing() -> None:
    over_pages("keep k <= q", [(7, 0), (33, 16), (2, 0)], (2, 2), (16, 16), 2)
    over_pages("keep k <= q and k >= 9", [(3, 2), (20, 1)], (2, 2), (16, 16), 2)


def test_fixed_keys_are_seen_by_every_token() -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 5, 16, generator=g)
    k, v = (torch.randn(2, 2, 7, 16, generator=g) for _ in "kv")
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    rows = Rows(torch.tensor([[0], [1]]), torch.tensor([0, 2, 5]), torch.tensor([9, 3]), torch.tensor([7, 7]))
    none = q.new_empty(1, 2, 0, 16)
    program = parse("keep r0[b, k]")
    found = Decode(Blocks(16, 16), 2).attend(program, q, (none, none), (k, v), [mask], (), rows)
    assert found is not None
    for row, place in enumerate((slice(0, 2), slice(2, 5))):
        one = slice(row, row + 1)
        wanted, _ = REFERENCE.forward(program, (q[:, :, place], k[one], v[one]), [mask[one]], ())
        torch.testing.assert_close(found[:, :, place], wanted, rtol=3e-5, atol=3e-5)


def test_long_prompts_and_what_it_cannot_read_are_left_to_others() -> None:
    g = torch.Generator().manual_seed(0)
    rows = Rows(torch.tensor([[0]]), torch.tensor([0, 20]), torch.tensor([0]), torch.tensor([0]))
    q = k = v = torch.randn(1, 2, 20, 16, generator=g)
    pages = torch.empty(1, 2, 20, 16)
    assert Decode().attend(parse("keep k <= q"), q, (k, v), (pages, pages), [], (), rows) is None
    few = Rows(torch.tensor([[0]]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]))
    odd = torch.zeros(20, dtype=torch.int8)
    one = (q[:, :, :1], (k[:, :, :1], v[:, :, :1]), (pages, pages))
    assert Decode().attend(parse("s = dot + r0[k]"), *one, [odd], (), few) is None
    half = tuple(t.double() for t in (pages, pages))
    assert Decode().attend(parse("keep k <= q"), one[0], one[1], half, [], (), few) is None  # type: ignore[arg-type]


def test_indices_out_of_range_are_left_to_what_raises() -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 1, 16, generator=g)
    pages = torch.randn(1, 2, 32, 16, generator=g)
    held = torch.tensor([20])
    rows = Rows(torch.tensor([[0]]), torch.tensor([0, 1]), held, held)
    about = q, (q, q), (pages, pages)
    for text in ("s = dot + r0[k]", "s = dot + r0[abs(q - k)]", "s = dot + r0[max(q - k, 0)]"):
        assert Decode().attend(parse(text), *about, [torch.randn(21)], (), rows) is not None
        assert Decode().attend(parse(text), *about, [torch.randn(20)], (), rows) is None


@pytest.mark.slow
def test_a_decoder_of_latent_attention_by_these_kernels_which_the_report_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = MLAConfig(
        layers=1, width=24, heads=4, latent=16, nope=6, rope=4, value=5, query_rank=8, hidden=16
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = MLADecoder(config).eval(), torch.randint(0, 256, (2, 5))
    decoder = attngraph.compile(model, cache=True, backend="triton", absorb="always")
    plans: list[DecodePlan] = []
    real = decode.launch_decode
    monkeypatch.setattr(decode, "launch_decode", lambda p, *rest: (plans.append(p), real(p, *rest))[1])
    found, whole = decoder.generate(ids, 3), ids
    with torch.no_grad():
        for _ in range(3):
            whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, whole)
    (entry,) = decoder.report.attention
    assert entry.kernel.name == "triton.decode for few new tokens"
    assert plans[-1].shared and entry.kernel.source == decode.emit_decode(plans[-1]).source


@pytest.mark.parametrize(
    ("heads", "widths", "splits"), [((6, 1), (16, 150), 37), ((4, 2), (16, 16), 17), ((20, 1), (24, 16), 33)]
)
@pytest.mark.parametrize(
    "text", ["s = 5.0 * tanh(dot / 5.0); keep k <= q; sink r0[h]", "s = 0.3 * dot; keep k <= q"]
)
def test_many_parts_are_combined(
    heads: tuple[int, int], widths: tuple[int, int], splits: int, text: str
) -> None:
    over_pages(text, [(300, 1), (0, 3), (41, 2)], heads, widths, splits)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], Callable[[], None]]]:
    """The launches of both kernels, which can be made again as a captured graph makes them."""
    found: list[tuple[tuple[int, ...], Callable[[], None]]] = []
    real = decode.load

    class Kernel:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                found.append((grid, lambda: self.kernel[grid](*args, **options)))
                found[-1][1]()

            return launch

    monkeypatch.setattr(decode, "load", lambda plan: tuple(map(Kernel, real(plan))))
    return found


def test_parts_are_combined_by_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch)
    over_pages("s = 0.2 * dot; keep k <= q", [(33, 2), (9, 1)], (20, 1), (200, 150), 4)
    heads, new, rows = 20, 2, 2
    assert launches[1][0] == (rows * heads * new, 1)


def test_launches_that_were_captured_serve_rows_that_have_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch)
    monkeypatch.setattr(device, "is_captured", lambda where: True)
    monkeypatch.setattr(device, "multiprocessors", lambda where: 8)
    monkeypatch.setattr(decode, "LEAST_KEYS", 64)
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, 150, 16, generator=g) for heads in (4, 2, 2)]
    held, starts = torch.tensor([3, 40]), torch.arange(3)
    pages = [torch.full((2, 2, 160, 16), torch.nan) for _ in "kv"]
    for row, count in enumerate(held.tolist()):
        for kept, values in zip(pages, whole[1:], strict=True):
            kept[row, :, :count] = values[row, :, :count]
    program, rows = parse("s = 0.3 * dot; keep k <= q"), Rows(torch.tensor([[0], [1]]), starts, held, held)

    def new_tokens(of: torch.Tensor) -> torch.Tensor:
        return torch.cat([of[row : row + 1, :, n : n + 1] for row, n in enumerate(held.tolist())], 2)

    q, k, v = map(new_tokens, whole)
    out = Decode(Blocks(16, 16)).attend(program, q, (k, v), (pages[0], pages[1]), [], (), rows)
    assert out is not None and launches[0][0][0] == 2 * 2 * 2  # rows, key heads, and parts of 160 keys
    for step in range(100):
        if step in (0, 1, 99):
            for _, again in launches[:2]:
                again()
            wanted = REFERENCE.forward(program, (whole[0], whole[1], whole[2]), [], ())[0]
            torch.testing.assert_close(out, new_tokens(wanted), rtol=3e-5, atol=3e-5)
        for row, count in enumerate(held.tolist()):
            pages[0][row, :, count], pages[1][row, :, count] = k[0, :, row], v[0, :, row]
        held += 1
        for tensor, values in zip((q, k, v), whole, strict=True):
            tensor.copy_(new_tokens(values))


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("widths", "heads", "latent", "dtype"),
    [
        ((16, 16), (4, 2), False, torch.float32),
        ((20, 13), (4, 2), False, torch.float16),
        ((24, 16), (20, 1), True, torch.float32),
    ],
)
def test_pages_of_8_bits(
    kept: torch.dtype, widths: tuple[int, int], heads: tuple[int, int], latent: bool, dtype: torch.dtype
) -> None:
    """Equal to PyTorch's operations on the same pages and scales; what no token wrote is NaN, or any number
    with NaN as its scale."""
    lengths, (d, dv) = [(21, 1), (0, 2), (9, 3)], widths
    g = torch.Generator().manual_seed(d)
    q, k, v = (
        torch.randn(3, n, 22, w, generator=g).to(dtype)
        for n, w in ((heads[0], d), (heads[1], d), (heads[1], dv))
    )
    k[..., 0] *= 40  # numbers of all sizes
    paged = Paged(k, k[..., :dv] if latent else v, lengths, latent=latent)
    keys, key_scales = quantise(paged.pages[0], kept)
    values, value_scales = (keys[..., :dv], key_scales) if latent else quantise(paged.pages[1], kept)
    program = parse("s = 0.05 * dot; keep k <= q; sink r0[h]")
    reads, pages, scales = [torch.randn(heads[0], generator=g)], (keys, values), (key_scales, value_scales)
    given = (program, paged.packed(q), paged.new, pages, reads, (), paged.rows)
    kernel = Decode(Blocks(16, 16), 2)
    found = kernel.attend(*given, scales)
    assert found is not None
    wanted = row_by_row(*given, "reference", scales)
    tolerance = {torch.float32: 3e-5, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("text", [*DECODED, "s = 0.3 * dot; keep k <= q; p = p * 2"])
@pytest.mark.parametrize("page", [3, 8])
@pytest.mark.parametrize(("heads", "widths", "latent"), [
    ((4, 2), (16, 16), False), ((40, 1), (24, 16), True),
])  # fmt: skip
def test_in_order_a_token_has_the_same_bits_in_any_chunk_and_company(
    text: str, page: int, heads: tuple[int, int], widths: tuple[int, int], latent: bool
) -> None:
    program = parse(f"{text.replace('; ', chr(10))}\nin order")
    length, kernel = 45, Decode(Blocks(16, 16, 4))
    q = torch.randn(1, heads[0], length, widths[0])
    k = torch.randn(1, heads[1], length, widths[0])
    v = k[..., : widths[1]] if latent else torch.randn(1, heads[1], length, widths[1])
    reads = [torch.randn(heads[0]) for _ in program.reads]

    def attended(held: int, count: int, beside: int) -> torch.Tensor:
        """Tokens of a row that has kept some, beside a row of others."""
        columns = -(-length // page)
        table = torch.randperm(2 * columns).view(2, columns)
        pages = torch.zeros(2 * columns, heads[1], page, widths[0])
        values = pages[..., : widths[1]] if latent else torch.zeros(2 * columns, heads[1], page, widths[1])
        for token in range(held):
            number, slot = table[0, token // page], token % page
            pages[number, :, slot], values[number, :, slot] = k[0, :, token], v[0, :, token]
        part = slice(held, held + count)
        new = torch.cat([k[:, :, part], torch.randn(1, heads[1], beside, widths[0])], 2)
        fresh = new[..., : widths[1]] if latent else torch.cat(
            [v[:, :, part], torch.randn(1, heads[1], beside, widths[1])], 2
        )  # fmt: skip
        queries = torch.cat([q[:, :, part], torch.randn(1, heads[0], beside, widths[0])], 2)
        rows = Rows(
            table, torch.tensor([0, count, count + beside]), torch.tensor([held, 0]), torch.tensor([held, 0])
        )
        found = kernel.attend(program, queries, (new, fresh), (pages, values), reads, [], rows)
        assert found is not None
        return found[:, :, :count]

    whole = attended(0, length, 3)
    for held, count, beside in ((0, 20, 1), (20, 1, 30), (21, 17, 2), (38, 7, 1)):
        assert torch.equal(attended(held, count, beside), whole[:, :, held : held + count])
