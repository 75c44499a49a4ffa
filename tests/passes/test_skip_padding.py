"""Tokens that a mask hides are left out of what is computed for each token alone, where nobody needs them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph

WIDTH, HEADS = 16, 2


class Block(nn.Module):
    """A layer of an encoder. `hide`: writes what hides keys into the scores."""

    def __init__(self, hide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.hide = hide

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = self.hide(q @ k.mT / 3, mask).softmax(-1)
        x = self.first(x + self.out((p @ v).transpose(1, 2).flatten(2)))
        return self.second(x + self.down(F.gelu(self.up(x))))


def by_infinity(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask[:, None, None] == 0, float("-inf"))


def by_number(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask[:, None, None] == 0, -1e9)


def by_lowest(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[:, None, None].bool(), scores, torch.finfo(scores.dtype).min)


def in_a_band(scores: Tensor, mask: Tensor, fill: float = -1e9) -> Tensor:
    i = torch.arange(mask.shape[1])
    near = (i[:, None] - i).abs() <= 2
    return scores.masked_fill(~(near & (mask[:, None, None] > 0)), fill)


def in_a_band_by_infinity(scores: Tensor, mask: Tensor) -> Tensor:
    """Tokens far from real ones are NaN, and then all are."""
    return in_a_band(scores, mask, float("-inf"))


def queries_alone(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask[:, None, :, None] == 0, -1e9)


def others_alone(scores: Tensor, mask: Tensor) -> Tensor:
    itself = torch.eye(mask.shape[1], dtype=torch.bool)
    return scores.masked_fill((mask[:, None, None] == 0) | itself, torch.finfo(scores.dtype).min)


def mean(x: Tensor, mask: Tensor) -> Tensor:
    weight = mask[..., None].float()
    return (x * weight).sum(1) / weight.sum(1)


def product(x: Tensor, mask: Tensor) -> Tensor:
    return torch.einsum("bt,btd->bd", F.normalize(mask.float(), 1, 1), x)


def largest(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask[..., None] == 0, -1e4).amax(1)


def first(x: Tensor, mask: Tensor) -> Tensor:
    return x[:, 0]


def last(x: Tensor, mask: Tensor) -> Tensor:
    return x[:, -1]


def mean_of_all(x: Tensor, mask: Tensor) -> Tensor:
    return x.mean(1)


def chosen(x: Tensor, mask: Tensor) -> Tensor:
    return x[torch.arange(len(x)), mask.sum(1) % x.shape[1]]


def first_of_all(x: Tensor, mask: Tensor) -> Tensor:
    """The sum over real tokens is not of what it is multiplied by, which is a sum over all."""
    return torch.einsum("bid,bjd,bj->bd", x, x, mask.float())


def tokens(x: Tensor, mask: Tensor) -> Tensor:
    return x


class Encoder(nn.Module):
    def __init__(self, hide: Any = by_infinity, pool: Any = mean, mix: Any = None, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, WIDTH), nn.Parameter(torch.randn(64, WIDTH))
        self.layers = nn.ModuleList(Block(hide) for _ in range(layers))
        self.pool, self.mix = pool, mix

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        x = self.words(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x if self.mix is None else self.mix(x), mask)
        return self.pool(x, mask)


def batch(rows: int = 4, count: int = 11, *lengths: int) -> tuple[Tensor, Tensor]:
    real = torch.tensor(lengths) if lengths else torch.randint(1, count, (rows,))
    return torch.randint(0, 50, (rows, count)), (torch.arange(count) < real[:, None]).long()


CALLS = {
    "some": batch(), "others": batch(3, 14), "all": batch(3, 9, 9, 9, 9), "one": batch(2, 12, 1, 1),
    "a row without": batch(3, 10, 4, 0, 10),
}  # fmt: skip


def products_left_out(compiled: Any) -> int:
    notes = [n for record in compiled.report.passes for n in record.notes if record.name == "skip-padding"]
    return sum(int(note.split()[0]) for note in notes if "leave out" in note)


def compare(model: nn.Module, where: str = "all", **options: Any) -> int:
    """Compare values, in all calls, with eager; returns how many products leave tokens out."""
    compiled = attngraph.compile(model.eval(), min_scores=0, **options)
    with torch.no_grad():
        for ids, mask in CALLS.values():
            wanted, found = model(ids, mask), compiled(ids, mask)
            if where == "real":
                wanted, found = wanted[mask > 0], found[mask > 0]
            torch.testing.assert_close(found, wanted, equal_nan=True, atol=1e-5, rtol=1e-5)
    return products_left_out(compiled)


@pytest.mark.parametrize("pool", [mean, product, largest, first, last])
@pytest.mark.parametrize("hide", [by_infinity, by_number, by_lowest])
def test_only_real_tokens_are_computed(hide: Any, pool: Any) -> None:
    assert compare(Encoder(hide, pool)) == 8


@pytest.mark.parametrize("pool", [mean, largest])
def test_tokens_see_those_near_them(pool: Any) -> None:
    assert compare(Encoder(in_a_band, pool)) == 8


@pytest.mark.parametrize(
    ("model", "products"),
    [
        (Encoder(pool=mean_of_all), 0), (Encoder(pool=chosen), 0), (Encoder(pool=tokens), 0),
        (Encoder(pool=first_of_all), 0),
        (Encoder(queries_alone), 0), (Encoder(others_alone), 0), (Encoder(in_a_band_by_infinity), 0),
        (Encoder(in_a_band, last), 0), (Encoder(in_a_band, tokens), 0),
        (Encoder(mix=lambda x: x + x.mean(1, keepdim=True)), 5),
        (Encoder(mix=lambda x: x + x.amax(1, keepdim=True)), 5),
        (Encoder(mix=lambda x: x.cumsum(1)), 5), (Encoder(mix=lambda x: x / x.shape[1]), 8),
    ],
    ids=["mean of all", "a place that data choose", "all tokens", "a product of sums", "mask of queries",
         "not itself", "NaN", "a token that sees hidden ones alone", "tokens that do", "mixed",
         "mixed with the largest", "sums", "how many tokens there are"],
)  # fmt: skip
def test_what_is_needed_of_hidden_tokens_is_computed(model: nn.Module, products: int) -> None:
    assert compare(model) <= products


def test_what_is_checked_of_all_tokens_is_checked_of_hidden_ones() -> None:
    class Checks(Encoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            y = self.layers[0].up(self.words(ids))
            torch._assert_async((y.abs() < 100).all(), "too large")
            x = self.layers[0](self.words(ids), mask)
            return mean(x, mask) + mean(y, mask)[:, :WIDTH]

    model = Checks(layers=1).eval()
    model.words.weight.data[49] = 1e4
    ids, mask = CALLS["some"]
    compiled = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids % 49, mask), model(ids % 49, mask), equal_nan=True)
        for call in (model, compiled):
            with pytest.raises(RuntimeError, match="too large"):
                call(torch.where(mask > 0, ids % 49, 49), mask)
    assert products_left_out(compiled) == 4


MASKS = {
    "numbers": (lambda s, m: s.masked_fill(m[:, None, None] == 0, -1e9), mean, lambda m: m.float()),
    "booleans": (lambda s, m: s.masked_fill(~m[:, None, None], float("-inf")), mean, lambda m: m.bool()),
    "padding is true": (
        lambda s, m: s.masked_fill(m[:, None, None], float("-inf")), lambda x, m: mean(x, ~m),
        lambda m: m == 0,
    ),
    "weights below 0": (
        lambda s, m: s.masked_fill(m[:, None, None] <= 0, -1e9), mean, lambda m: 3 * m - 2 * (m == 0).long(),
    ),
    "all have weight": (lambda s, m: s.masked_fill(m[:, None, None] < 2, -1e9), mean, lambda m: m + 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", MASKS)
def test_what_a_mask_is_of(kind: str) -> None:
    """A hidden token that has a weight in the mean is computed."""
    hide, pool, change = MASKS[kind]
    model = Encoder(hide, pool).eval()
    compiled = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        for ids, mask in CALLS.values():
            torch.testing.assert_close(
                compiled(ids, change(mask)), model(ids, change(mask)), equal_nan=True, atol=1e-5, rtol=1e-5
            )
    assert products_left_out(compiled) == 8


def test_padding_on_the_left() -> None:
    model = Encoder(pool=first).eval()
    compiled = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        for ids, mask in CALLS.values():
            torch.testing.assert_close(compiled(ids, mask.flip(1)), model(ids, mask.flip(1)), equal_nan=True)
    assert products_left_out(compiled) == 8


def test_results_of_hidden_tokens_may_be_unused() -> None:
    assert compare(Encoder(pool=tokens), "real", padding="unused") == 8
    ids, mask = CALLS["some"]
    with torch.no_grad():
        found = attngraph.compile(Encoder(pool=tokens).eval(), min_scores=0, padding="unused")(ids, mask)
    assert not found[mask == 0].any()


def test_few_hidden_tokens_are_computed_with_the_rest() -> None:
    model = Encoder(pool=first).eval()
    compiled = attngraph.compile(model, min_scores=0)
    ids, mask = torch.randint(0, 50, (5, 40)), torch.ones(5, 40, dtype=torch.long)
    mask[0, -1] = 0
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, mask), model(ids, mask))


@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_of_pytorch(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=batch_first)
    inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner = nn.Embedding(50, WIDTH), inner

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            x = self.words(ids) if batch_first else self.words(ids).transpose(0, 1)
            x = self.inner(x, src_key_padding_mask=mask == 0)
            return mean(x if batch_first else x.transpose(0, 1), mask)

    model = Model().eval()
    compiled = attngraph.compile(model, min_scores=0)
    for name in ("some", "others", "all", "one"):
        ids, mask = CALLS[name]
        with torch.no_grad():
            found = compiled(ids, mask)
        torch.testing.assert_close(found, model(ids, mask), atol=1e-5, rtol=1e-5)
    assert products_left_out(compiled) == 8


@pytest.mark.parametrize("pool", [mean, first])
def test_gradients(pool: Any) -> None:
    model = Encoder(by_lowest, pool)
    compiled = attngraph.compile(model, min_scores=0)
    for name in ("some", "all", "a row without"):
        ids, mask = CALLS[name]
        mask = mask.clone()
        mask[mask.sum(1) == 0, 0] = int(pool is mean)
        weight = torch.randn(len(ids), WIDTH)
        both = [torch.autograd.grad((m(ids, mask) * weight).sum(), list(model.parameters()))
                for m in (model, compiled)]  # fmt: skip
        for wanted, found in zip(*both, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert products_left_out(compiled) == 8


def test_dropout_is_drawn_for_all_tokens() -> None:
    """It would be other numbers else: those of the model's own generator."""
    model = Encoder(pool=first, mix=nn.Dropout(0.5)).train()
    compiled = attngraph.compile(model, min_scores=0)
    ids, mask = CALLS["some"]
    for _ in range(2):
        torch.manual_seed(7)
        wanted = model(ids, mask)
        torch.manual_seed(7)
        torch.testing.assert_close(compiled(ids, mask), wanted)


def test_a_saved_graph(tmp_path: Path) -> None:
    model = Encoder().eval()
    compiled = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        wanted = [compiled(*call) for call in CALLS.values()]
        compiled.save(tmp_path / "saved")
        loaded = attngraph.load(tmp_path / "saved", copy.deepcopy(model), strict=True)
        for call, value in zip(CALLS.values(), wanted, strict=True):
            torch.testing.assert_close(loaded(*call), value, equal_nan=True)
    assert products_left_out(loaded) == 8


def test_the_same_bits() -> None:
    model = Encoder(pool=first).eval()
    compiled = attngraph.compile(model, consistent=True)
    ids, mask = CALLS["some"]
    with torch.no_grad():
        together = compiled(ids, mask)
        for row in range(len(ids)):
            alone = compiled(
                ids[row : row + 1, : int(mask[row].sum())], mask[row : row + 1, : int(mask[row].sum())]
            )
            assert torch.equal(alone[0], together[row])


def test_an_unknown_word() -> None:
    with pytest.raises(ValueError, match="padding must be 'computed' or 'unused', found 'zeros'"):
        attngraph.compile(Encoder(), padding="zeros")
