"""The token-axis analysis, what a mask lets a token see, and the proof that catches what they miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attngraph
from attngraph import CacheConfig, NoDecoderError, parse
from attngraph.capture.trace import capture
from attngraph.ir.language import expr as E
from attngraph.ir.ops import cached_attention
from attngraph.ir.ops.cached_attention import CachePlan, Store
from attngraph.meaning.algebra import M
from attngraph.meaning.masks.causal import examine
from attngraph.meaning.tokens.attentions import ending_at_query
from attngraph.meaning.tokens.facts import Space
from attngraph.meaning.tokens.numbers import OfSizes, reach
from attngraph.meaning.tokens.token_probe import select
from attngraph.meaning.tokens.tokens import Kind, Tokens
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.passes.canonicalize import Canonicalize
from attngraph.passes.fuse_attention import FuseAttention
from attngraph.passes.insert_kv_cache.write_formula import ByIndex
from attngraph.pipeline import run
from attngraph.runtime import pages
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.proof import poison
from tests.cache.models import Small, attend

REACHES: dict[str, tuple[Any, float]] = {
    "a comparison": (lambda x, p: x * (p == 300), 300),
    "bits": (lambda x, p: x * ((p ^ 300) == 0), 300),
    "pieces of the tokens": (lambda x, p: x.split([300, x.shape[1] - 300], 1)[0], 600),
    "places between taps": (lambda x, p: torch.conv1d(x.mT, torch.ones(8, 1, 2), None, 1, 300, 300, 8), 600),
    "a new dimension": (lambda x, p: torch.stack([x, x], 3).unsqueeze(4), 0),
    "pieces of the features": (lambda x, p: x.unflatten(2, (4, 2)).split([3, 1], 2)[0], 0),
}


@pytest.mark.parametrize("name", REACHES)
def test_every_number_counts_that_may_set_tokens_apart(name: str) -> None:
    """Whatever the operation is called; but not dimensions, shapes, and pieces of what is no token."""
    function, least = REACHES[name]
    x = torch.randn(2, 400, 8)
    graph = capture(lambda x: function(x, torch.arange(x.shape[1])[:, None]), (x,), {}).graph
    found = reach(list(graph.graph.nodes), {}, OfSizes())
    assert least <= found <= least + 2


def facts(function: Any, *shapes: tuple[int, ...]) -> tuple[Tokens, Any]:
    """What is known of the result of a function of ids `[2, 5]`, and of tensors that follow no tokens."""
    ids = torch.randint(0, 9, (2, 5))
    others = tuple(torch.randn(shape) for shape in shapes)
    with torch.no_grad():
        graph = capture(function, (ids, *others), {}).graph
        run(graph, (Canonicalize(), FuseAttention()))
    (place,) = (
        n
        for n, i in zip(graph.placeholders(), graph.inputs, strict=True)
        if i.kind == "argument" and i.name == "0"
    )
    rows, tokens = (str(s.node.expr) for s in place.meta["val"].shape)
    found = Tokens(graph, tokens, rows)
    (result,) = graph.graph.output_node().args[0]  # type: ignore[misc, union-attr]
    return found, found[result]


def embed(ids: Tensor) -> Tensor:
    return torch.sin(ids[..., None] * torch.arange(1, 9))


FACTS: dict[str, tuple[Kind, Any]] = {
    "sorted by token and put back": (Kind.TOKEN, lambda ids: _by_experts(embed(ids))),
    "flattened": (
        Kind.TOKEN, lambda ids: (embed(ids).reshape(-1, 8) @ torch.ones(8, 3)).reshape(*ids.shape, 3)),
    "transposed": (Kind.TOKEN, lambda ids: embed(ids).transpose(0, 1).relu()),
    "heads beside tokens": (
        Kind.TOKEN,
        lambda ids: embed(ids).view(*ids.shape, 2, 4).transpose(1, 2).reshape(-1, ids.shape[1], 4)),
    "normalised": (Kind.TOKEN, lambda ids: torch.nn.functional.layer_norm(embed(ids), (8,))),
    "with places": (Kind.TOKEN, lambda ids: embed(ids) * torch.arange(ids.shape[1])[:, None]),
    "sorted within a token": (Kind.TOKEN, lambda ids: embed(ids).sort(-1).values),
    "a range": (Kind.POSITION, lambda ids: torch.arange(ids.shape[1]) * 2 + 1),
    "a running count": (Kind.POSITION, lambda ids: torch.ones_like(ids).cumsum(1) - 1),
    "the front of a table": (
        Kind.POSITION, lambda ids: torch.linspace(0, 1, 40)[3 : 3 + ids.shape[1]]),
    "of no tokens": (Kind.FIXED, lambda ids, other: other.softmax(0) * ids.shape[0] ** 0),
}  # fmt: skip
MIXING = {
    "a mean": (lambda ids: embed(ids) - embed(ids).mean(1, keepdim=True), (0, 1)),
    "flipped": (lambda ids: embed(ids).flip(1), (0, 4)),
    "from the end": (lambda ids: embed(ids) * (ids.shape[1] - torch.arange(ids.shape[1]))[:, None], None),
    "shifted ahead": (lambda ids: torch.nn.functional.pad(embed(ids)[:, 1:], (0, 0, 0, 1)), (0, 1)),
    "another sequence": (lambda ids: embed(ids) + embed(ids).flip(0), None),
    "from a quarter": (lambda ids: _from_a_quarter(torch.arange(ids.shape[1])), None),
    "sorted tokens": (lambda ids: embed(ids).sort(1).values, (0, 1)),
}


def _from_a_quarter(places: Tensor) -> Tensor:
    return places - (places.max() + 1) // 4


def _by_experts(x: Tensor) -> Tensor:
    flat = x.reshape(-1, 8)
    order = flat[:, 0].argsort()
    worked = flat[order].exp()
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return worked[back].view_as(x)


@pytest.mark.parametrize("name", FACTS)
def test_what_a_value_is_is_known(name: str) -> None:
    kind, function = FACTS[name]
    found, fact = facts(function, *([(3, 4)] if kind is Kind.FIXED else []))
    assert fact.kind is kind, fact.reason
    assert kind is not Kind.POSITION or found.space.place(fact.axes, found.space.token) is not None


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_seen_and_shown(name: str) -> None:
    function, pair = MIXING[name]
    found, fact = facts(function)
    assert fact.kind is Kind.MIXING
    (result,) = found.graph.graph.output_node().args[0]  # type: ignore[misc, union-attr]
    if pair is not None:
        assert found.witness(found.cause(result), result) is not None


@pytest.mark.slow
def test_dumps_say_what_every_value_is(tmp_path: Path) -> None:
    model = DecoderLM(DecoderLMConfig(20, 1, 8, 2, max_tokens=32)).eval()
    compiled = attngraph.compile(model, cache=True, dump=tmp_path)
    compiled.prefill(torch.tensor([[1, 2, 3]]))
    (file,) = tmp_path.glob("graph-*/*insert-kv-cache.txt")
    text = file.read_text()
    assert "attention(2): a token looks at itself and at earlier ones" in text
    assert "position(0)" in text and "token-wise(1)" in text
    assert "cached_attention(" in text and "keep k <= q" in text


# --- masks ---

CAUSAL = [
    "keep k <= q", "keep not (k > q)", "keep q >= k and q - k < 4", "keep k <= q else -1e9",
    "keep k <= q else s - 3.4e38", "keep r0[b, q] == r0[b, k] and k <= q", "keep k < q or k == q",
    "keep k <= q and (q - k < 4 or k < 2)", "keep k < q",
    "keep k <= q - 1 or q == k", "keep k <= q\np = 0.5 * p",
]  # fmt: skip
NOT_CAUSAL = [
    "s = dot", "keep k <= q + 1", "keep k < 5 or k <= q", "keep k // 4 <= q // 4", "keep k <= q else -5.0",
    "keep k <= q\ns = tanh(s)", "keep q <= k", "keep r0[b, k] != 0", "keep k <= q\np = p + 1.0",
    "s = dot + r0[b, k]\np = where(k <= q, p, 0.0)",
    "keep k < q else -1e9",
    "keep k < q else s - 1e9",
]  # fmt: skip


@pytest.mark.parametrize("text", CAUSAL)
def test_masks_that_hide_all_later_tokens(text: str) -> None:
    assert not examine(parse(text), True, frozenset()).problem


@pytest.mark.parametrize("text", NOT_CAUSAL)
def test_masks_that_do_not(text: str) -> None:
    found = examine(parse(text), True, frozenset())
    assert found.problem
    if found.witness is not None:
        q, k = found.witness
        assert k > q


def test_windows_are_read_off() -> None:
    for text, window in (
        ("keep k <= q and q - k < 7", 7), ("keep k <= q and k > q - 3", 3), ("keep k <= q", None),
        ("keep k <= q and (q - k < 4 or q - k < 9)", 9), ("keep k <= q and (q - k < 4 or k == 0)", None),
    ):  # fmt: skip
        assert examine(parse(text), True, frozenset()).window == window


SHIFTED = {
    "s = 0.5 * dot + (k - n0 + 1) * 0.25\nkeep k <= q": "s = 0.5 * dot + 0.25 * k - 0.25 * q\nkeep k <= q",
    "s = dot + (k - n0 + 1) * exp(-h)\nkeep k <= q else -9e9": (
        "s = dot + (k - q) * exp(-h)\nkeep k <= q else -9000000000.0"
    ),
    "s = dot + r0[h] * n0\nkeep k <= q\np = 2.0 * p": "s = dot + (q + 1) * r0[h]\nkeep k <= q\np = 2.0 * p",
}
NOT_SHIFTED = {
    "the number scales": "s = dot / n0\nkeep k <= q",
    "the number scales places": "s = dot + k / n0\nkeep k <= q",
    "a number for some keys": "s = dot + where(k < 3, n0, 0)\nkeep k <= q",
    "a fill that other scores are near to": "s = dot + n0\nkeep k <= q else -5.0",
    "a sink": "s = dot + n0\nkeep k <= q\nsink 1.0",
    "scores that are bent afterwards": "s = dot + n0\ns = tanh(s)\nkeep k <= q",
    "a mask of scores": "s = dot + n0\nkeep k <= q and s > 3.0",
    "a mask of the number": "keep k <= q and k < n0 - 2",
}


@pytest.mark.parametrize("text", SHIFTED)
def test_scores_that_the_number_of_tokens_shifts_alike_are_those_of_the_query_at_the_end(text: str) -> None:
    program = parse(text)
    found = ending_at_query(program, {"n0"})
    assert str(found) == SHIFTED[text]
    assert not examine(found, True, frozenset({"n0"})).problem
    assert ending_at_query(program, set()) == program


@pytest.mark.parametrize("name", NOT_SHIFTED)
def test_what_the_number_of_tokens_decides_otherwise_keeps_it(name: str) -> None:
    program = parse(NOT_SHIFTED[name])
    assert ending_at_query(program, {"n0"}) == program
    assert "how many tokens there are" in examine(program, True, frozenset({"n0"})).problem


@st.composite
def predicates(draw: st.DrawFn, depth: int = 2) -> str:
    if depth == 0 or draw(st.booleans()):
        left = draw(st.sampled_from(["k", "k + 1", "k - 2", "2 * k", "k // 3", "k % 3", "q - k"]))
        right = draw(st.sampled_from(["q", "q + 1", "q - 1", "2 * q", "q // 3", "q % 3", "3", "0"]))
        return f"({left} {draw(st.sampled_from(['<=', '<', '>=', '>', '==', '!=']))} {right})"
    parts = [draw(predicates(depth - 1)) for _ in range(2)]
    return f"({parts[0]} {draw(st.sampled_from(['and', 'or']))} {parts[1]})"


@settings(max_examples=200, deadline=None)
@given(predicates())
def test_what_is_said_to_be_hidden_is_hidden(text: str) -> None:
    """Brute force over small positions: "causal" and the window are never said wrongly."""
    found = examine(parse(f"keep {text}"), True, frozenset())
    kept = [(q, k) for q in range(20) for k in range(20) if eval(text.replace("//", "//"), {"q": q, "k": k})]
    if not found.problem:
        assert all(k <= q for q, k in kept)
        if found.window is not None:
            assert all(q - k < found.window for q, k in kept)
    elif found.witness is not None:
        assert found.witness in kept or max(found.witness) >= 20
    assert M.canonical(E.const(1)) is E.ONE


# --- packing ---


def test_selecting_tokens_of_a_tensor() -> None:
    space = Space(E.var("t", E.size("T")), E.var("b", E.size("B")))
    b, t = space.row, space.token
    assert b is not None
    x = torch.arange(2 * 5 * 3).view(2, 5, 3)
    picks = [(1, 4), (0, 2)]
    wanted = torch.stack([x[1, 4], x[0, 2]])
    assert torch.equal(select(x, ((b,), (t,), ()), space, picks, (2, 5)), wanted[None])
    assert torch.equal(select(x.view(10, 3), ((b, t), ()), space, picks, (2, 5)), wanted)
    assert torch.equal(select(x.transpose(0, 1), ((t,), (b,), ()), space, picks, (2, 5)), wanted[:, None])
    with pytest.raises(ValueError, match="each sequence"):
        select(x[:, 0], ((b,), ()), space, picks, (2, 5))


# --- the proof ---


def _off_by_one(patch: pytest.MonkeyPatch) -> None:
    write = ByIndex.write
    patch.setattr(ByIndex, "write", lambda self: self.builder.call(torch.ops.aten.add.Scalar, write(self), 1))


def _in_the_wrong_place(patch: pytest.MonkeyPatch) -> None:
    write = pages.Pages.write

    def wrong(self: Any, news: Any, row: Tensor, positions: Tensor, firsts: Any, counts: Any) -> None:
        write(self, news, row, (positions - 1).clamp_min(0), [max(0, n - 1) for n in firsts], counts)

    patch.setattr(pages.Pages, "write", wrong)


def _reads_pages_without_tokens(patch: pytest.MonkeyPatch) -> None:
    """Of those that were added after the four that the proof begins with. Their memory may hold numbers that
    do no harm: the proof must not depend on it."""
    gather, empty = cached_attention.gather, pages.Pages._empty
    patch.setattr(pages.Pages, "_empty", lambda *args: empty(*args).zero_())
    patch.setattr(
        cached_attention, "gather", lambda store, *others: gather(store, *others) + 0 * store[4:].sum()
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [(_off_by_one, "do not give what the whole sequence gives"), (_in_the_wrong_place, "do not give"),
     (_reads_pages_without_tokens, "NaN in other places")],
)  # fmt: skip
def test_the_proof_catches_faults(
    fault: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = (
        Small(lambda m, x: attend(x, x, x + m.places(torch.arange(x.shape[1])))),
        torch.arange(3)[None],
    )
    fault(monkeypatch)
    with pytest.raises(NoDecoderError, match=message):
        attngraph.compile(model, cache=True).prefill(prompt)
    unproved = attngraph.compile(model, cache=CacheConfig(proof=False))
    unproved.prefill(prompt)
    assert unproved.report.cache is not None and unproved.report.cache.error is None


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("window", [None, 3])
def test_only_what_holds_a_token_is_a_number_in_the_proof(layout: str, window: int | None) -> None:
    shape = (0, 2, 0, 1)  # pages, heads, tokens of each, width
    plan = CachePlan((Store("kept", shape, 0, 2, torch.float64, window, ""),))
    state = KVCache(plan, 2, CacheConfig(layout=layout, page=2, rollback=1), torch.device("cpu"))

    def step(*counts: int) -> None:
        state.reserve(counts)
        poison(state)
        assert numbers() == held()
        rows = state.inputs(counts)
        news = rows["positions"].double()[None, None, :, None].expand(1, 2, -1, 1)
        state.write({"kept": news}, rows, counts)

    def held() -> list[float]:
        """The positions of each row that are kept and were not overwritten, twice, for two heads."""
        (group,) = state.groups.values()
        places = zip(state.lengths, state.now.lost, strict=True)
        firsts = [(max(lost, n - group.capacity, 0), n) for n, lost in places]
        return sorted(2 * [float(p) for first, n in firsts for p in range(first, n)])

    def numbers() -> list[float]:
        (store,) = state.stores().values()
        return sorted(store[~store.isnan()].tolist())

    step(3, 1)
    step(1, 2)  # pages are added
    step(2, 0)
    state.crop([5, 1])  # slots are given back
    step(1, 1)
    state.reset(0)
    step(2, 2)
    poison(state)
    assert numbers() == held()
