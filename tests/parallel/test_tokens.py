"""Tokens divided among simulated ranks: values, gradients, what is fetched, what is not divided and why."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.token_collectives import Layout, needed_keys
from attngraph.meaning.masks.tiles import visible_keys
from attngraph.models.mla import MLAConfig, MLADecoder
from attngraph.report.ranks import ContextEntry

Compared = Callable[..., ContextEntry]
WIDTH, HEADS, KV = 16, 4, 2
ITEM = 8
"""Bytes of a number in float64."""


class Attention(nn.Module):
    """Attention of 4 heads over 2 key/value heads, of one of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(HEADS, 17))
        self.sink = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("slopes", torch.rand(HEADS))

    def forward(self, x: Tensor, about: Tensor | None = None) -> Tensor:
        s = x.shape[1]
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * KV, -1)).transpose(1, 2).chunk(2, 1)
        i = torch.arange(s)
        far = i[:, None] - i
        if self.kind == "rotary":
            angle = (i[:, None] * torch.tensor([1.0, 0.1])).repeat(1, 2)
            q, k = (t * angle.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * angle.sin() for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        scores = q @ k.mT / math.sqrt(WIDTH // HEADS)
        if self.kind == "table":
            scores = scores + self.table[:, far.clamp(-8, 8) + 8]
        if self.kind == "slopes":
            scores = scores - self.slopes[:, None, None] * far
        if self.kind in ("pad", "pad and causal") and about is not None:
            scores = scores.masked_fill(~about[:, None, None], float("-inf"))
        if self.kind == "documents" and about is not None:
            scores = scores.masked_fill((about[:, None] != about[..., None])[:, None], float("-inf"))
        if self.kind not in ("full", "pad", "table"):
            scores = scores.masked_fill(far < 0, float("-inf"))
        if self.kind == "window":
            scores = scores.masked_fill(far >= 3, float("-inf"))
        if self.kind == "chunks":
            scores = scores.masked_fill(i[:, None] // 4 != i // 4, float("-inf"))
        if self.kind == "sink":
            column = self.sink[None, :, None, None].expand(x.shape[0], -1, s, 1)
            p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            p = scores.softmax(-1)
        return x + self.out((p @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: str, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(32, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Attention(kind) for _ in range(layers))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor, about: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, about)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norm(x))


def _ids(tokens: int, rows: int = 2) -> Tensor:
    return torch.randint(0, 32, (rows, tokens))


def _keys(entry: ContextEntry, tokens: int, rows: int = 2) -> list[float]:
    """The keys that each rank fetches for an attention, by the bytes in the report."""
    each = rows * KV * (WIDTH // HEADS) * ITEM
    found = [f for f in entry.fetched if f.what == "keys or values"]
    assert len(found) == 2, "keys, and values"
    return [n / each for n in found[0].bytes]


KINDS: dict[str, list[int] | None] = {
    "causal": [4 * (7 - rank - 1) for rank in range(4)],
    "window": [0, 2, 2, 2],
    "full": [24] * 4,
    "chunks": [0] * 4,
    "rotary": None,
    "table": None,
    "slopes": None,
    "sink": None,
}
"""Keys of other ranks that each of 4 fetches for 32 tokens. Causal: rank r has chunks r and 7 - r of 8, and
sees all before the second. A window of 3 reaches 2 tokens over each border, none before the first rank."""


@pytest.mark.parametrize("ranks", [4, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_divided(same_by_tokens: Compared, kind: str, ranks: int) -> None:
    entry, keys = same_by_tokens(Model(kind), ranks, _ids(32 if ranks == 4 else 16)), KINDS[kind]
    assert [a.attentions for a in entry.axes] == [1] and entry.whole == ()
    if ranks == 4 and keys is not None:
        assert _keys(entry, 32) == keys
        assert entry.axes[0].chunks == (2 if kind == "causal" else 1)
        assert kind != "causal" or max(entry.axes[0].pairs) <= 1.1 * sum(entry.axes[0].pairs) / 4


@pytest.mark.parametrize("kind", ["pad", "pad and causal"])
def test_padding_is_that_of_the_whole_sequence(same_by_tokens: Compared, kind: str) -> None:
    seen = torch.ones(2, 16, dtype=torch.bool)
    seen[0, 11:] = False
    entry = same_by_tokens(Model(kind, layers=2), 4, _ids(16), seen)
    assert all(f.at_most for f in entry.fetched if f.what == "keys or values")
    if kind == "pad and causal":  # the first queries see no key: their gradients are not promised
        same_by_tokens(Model(kind), 2, _ids(16), seen.flip(1), gradients=False)


@pytest.mark.slow
def test_documents_are_not_mixed_and_fetch_no_others(same_by_tokens: Compared) -> None:
    """What is fetched depends on the numbers of documents in the call, and is right for each."""
    for ends in ([4, 8, 12], [3, 9], [16]):
        about = torch.zeros(2, 16, dtype=torch.long)
        for end in ends:
            about[:, end:] += 1
        same_by_tokens(Model("documents", layers=2), 4, _ids(16), about)


def test_keys_are_counted_from_the_documents_of_a_call() -> None:
    layout = Layout(((0,), (1,), (2,), (3,)))
    about = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]).expand(2, -1)
    mask = "keep r0[b, q] == r0[b, k] and k <= q"
    needed = needed_keys(mask, [about], (), layout, 16)
    assert needed.sum(1).tolist() == [0, 0, 0, 4]
    assert needed_keys("keep r0[b, q] == r0[b, k]", [about], (), layout, 16).sum(1).tolist() == [0, 0, 4, 4]
    assert needed_keys("", [], (), layout, 16).sum(1).tolist() == [12] * 4


@pytest.mark.parametrize("program, keys", [
    ("keep k <= q else -1e9", [0, 8]), ("keep k < q else -1e9", [8, 8]), ("keep k < q", [0, 8]),
    ("keep k <= q; s = dot", [8, 8]), ("keep k <= q else -5", [8, 8]),
])  # fmt: skip
def test_only_keys_that_get_no_weight_are_left_out(program: str, keys: list[int]) -> None:
    """A finite fill hides where every query sees a key; a score computed after a mask shows all."""
    mask, _ = visible_keys(parse(program))
    assert needed_keys(str(mask), [], (), Layout(((0,), (1,))), 16).sum(1).tolist() == keys


class Encoded(nn.Module):
    """Queries of one length attend to an encoder's tokens of another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Attention("full"), Attention("causal")
        self.embed = nn.Embedding(32, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, ids: Tensor, source: Tensor) -> Tensor:
        memory, x = self.encoder(self.embed(source)), self.decoder(self.embed(ids))
        k, v = self.kv(memory).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("lengths, divided", [((8, 12), 2), ((12, 8), 2), ((8, 9), 1)])
def test_an_encoder_and_its_decoder_are_each_divided(
    same_by_tokens: Compared, lengths: tuple[int, int], divided: int
) -> None:
    entry = same_by_tokens(Encoded(), 2, *map(_ids, lengths))
    assert len(entry.axes) == divided
    assert ("9 tokens cannot be divided" in str(entry.whole)) == (divided == 1)
    assert ("queries of another sequence see it" in str(entry.whole)) == (divided == 2)


class Mixing(nn.Module):
    """A block of attention, and something after it that mixes tokens, or that only looks like it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.layer = how, nn.Embedding(32, WIDTH), Attention("causal")
        self.conv, self.last = nn.Conv1d(WIDTH, WIDTH, 3, padding=2), Attention("window")
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.embed(ids))
        s = x.shape[1]
        match self.how:
            case "mean":
                x = x + x.mean(1, keepdim=True)
            case "cumsum":
                x = x.cumsum(1)
            case "flip":
                x = x + x.flip(1)
            case "conv":
                x = self.conv(x.mT)[..., :s].mT
            case "last":
                return x[:, -1]
            case "softmax over tokens":
                x = x.softmax(1)
            case "dropout":
                x = F.dropout(x, 0.5, True)
            case "places":
                x = x * torch.arange(1, s + 1)[:, None]
            case "length":
                x = x / s
            case "rows":
                x = self.norm(x.flatten(0, 1)).unflatten(0, (ids.shape[0], s))
            case "width":
                x = x.flip(-1).cumsum(-1)
        return self.last(x)


TOLD = ("mean", "cumsum", "flip", "conv", "last", "softmax over tokens")


@pytest.mark.parametrize("how", ["length", *TOLD, "places", "rows", "width", "dropout"])
def test_what_mixes_tokens_is_computed_from_all_and_told(same_by_tokens: Compared, how: str) -> None:
    """What uses places, lengths or random numbers does not."""
    entry = same_by_tokens(Mixing(how), 2, _ids(16))
    assert entry.axes[0].attentions == (1 if how == "last" else 2)  # divided again afterwards
    assert any("test_tokens.py" in w.source for w in entry.whole) == (how in TOLD), entry.whole
    assert how in TOLD or entry.whole == ()


class Learning(nn.Module):
    """Returns its loss, as models of transformers do; tokens with the label -100 do not count."""

    def __init__(self, reduction: str = "mean", smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.how = Model("causal"), {"reduction": reduction, "label_smoothing": smoothing}

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten(), **self.how)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [("mean",), ("sum",), ("mean", 0.2)])
def test_a_loss_gathers_one_number_a_token(same_by_tokens: Compared, how: tuple[Any, ...]) -> None:
    ids = _ids(16)
    labels = ids.masked_fill(ids < 5, -100)
    entry = same_by_tokens(Learning(*how), 2, ids, labels)
    gathered = [f.bytes for f in entry.fetched if f.what == "all tokens of a value"]
    assert gathered == [(2 * 8 * ITEM,) * 2]


@pytest.mark.slow
def test_other_numbers_of_tokens_are_served() -> None:
    """Those that cannot be divided are computed whole, others in one run or two, by graphs of their own."""
    model = Model("causal").double()
    compiled, found = attngraph.compile(model, mesh=attngraph.SimulatedMesh(context=4)), list[int]()
    for tokens, chunks in ((8, [2]), (12, [1]), (13, []), (24, [2]), (14, []), (20, [1])):
        ids = _ids(tokens)
        torch.testing.assert_close(compiled(ids), model(ids))
        found.append(compiled.report.graphs)
        entry = compiled.report.context
        if found[-1] not in found[:-1]:
            assert entry is not None and [a.chunks for a in entry.axes] == chunks, tokens
    assert found == [1, 2, 3, 3, 3, 3]


def test_dropped_weights_are_those_of_one_device() -> None:
    class Dropped(Attention):
        def forward(self, x: Tensor, about: Tensor | None = None) -> Tensor:
            q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.4).transpose(1, 2)

    model, x, both = Dropped("").double(), torch.randn(2, 16, WIDTH, dtype=torch.float64), []
    for mesh in (None, attngraph.SimulatedMesh(context=2)):
        torch.manual_seed(3)
        both.append(attngraph.compile(model, mesh=mesh, min_scores=0)(x))
    torch.testing.assert_close(*both)


def test_what_stands_between_values_that_all_ranks_have_is_not_divided(same_by_tokens: Compared) -> None:
    """The tanh of a sum over tokens is computed by all: dividing it would only add a gathering. A product is
    worth one."""

    class Sums(Attention):
        def __init__(self, product: bool) -> None:
            super().__init__("causal")
            self.last = nn.Linear(WIDTH, WIDTH) if product else nn.Tanh()

        def forward(self, x: Tensor, about: Tensor | None = None) -> Tensor:
            return self.last(super().forward(x).cumsum(1)).cumsum(1)

    for product, gathered in ((False, 1), (True, 2)):
        entry = same_by_tokens(Sums(product), 2, torch.randn(2, 16, WIDTH, dtype=torch.float64))
        assert sum(f.what == "all tokens of a value" for f in entry.fetched) == gathered
        assert len(entry.whole) == gathered


class Fixed(nn.Module):
    """A table of 16 rows that attend to each other, whatever the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Parameter(torch.randn(16, WIDTH)), Attention("full")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rows + x[:, None])


def test_where_no_attention_is_of_the_inputs_tokens_nothing_is_divided(same_by_tokens: Compared) -> None:
    entry = same_by_tokens(nn.Linear(4, 4), 2, torch.randn(2, 8, 4, dtype=torch.float64))
    assert entry.axes == () and entry.received == (0, 0)
    entry = same_by_tokens(Fixed(), 2, torch.randn(3, WIDTH, dtype=torch.float64))
    assert entry.axes == () and "its 16 queries are no size of the model's inputs" in str(entry.whole)


@pytest.mark.parametrize("absorb", ["always", "never"])
def test_latents_are_fetched_instead_of_keys(absorb: str) -> None:
    """Of a latent attention a rank fetches one narrow vector a token, or keys and values of all heads."""
    sizes = {"vocab_size": 32, "layers": 1, "width": 24, "heads": 4, "latent": 16, "nope": 6, "rope": 4}
    model = MLADecoder(MLAConfig(**sizes, value=5, query_rank=8, hidden=16)).double()
    ids, mesh = _ids(16), attngraph.SimulatedMesh(context=2)
    compiled = attngraph.compile(model, mesh=mesh, absorb=absorb)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), model(ids))
    entry = compiled.report.context
    assert entry is not None and [a.attentions for a in entry.axes] == [1]
    each = 2 * 8 * ITEM * (16 + 4 if absorb == "always" else 4 * (6 + 4 + 5))
    fetched = sum(max(f.bytes) for f in entry.fetched if f.what == "keys or values")
    assert fetched == each
