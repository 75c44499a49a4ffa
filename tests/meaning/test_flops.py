"""The formulas of FlopCounterMode for our ops: against brute force, and against the unfused model."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import attngraph
import attngraph.api
from attngraph.ir.language.evaluate import Environment, Tile
from attngraph.ir.language.parser import parse
from attngraph.meaning.masks.flops import TILE, computed_pairs
from attngraph.meaning.masks.visible import HIDDEN, visible

ops = torch.ops.attngraph


def counted(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def brute_force(program: str, batch: int, heads: int, queries: int, keys: int, sizes: tuple[int, ...]) -> int:
    """Every tile that holds a pair which is not hidden, by evaluating the mask at every pair."""
    whole = Tile((0, batch), (0, heads), (0, queries), (0, keys))
    env = Environment(whole, (), sizes, torch.float64, torch.device("cpu"))
    shown = visible(parse(program), env).expand(batch, heads, queries, keys) != HIDDEN
    found = 0
    for rows, columns in itertools.product(range(0, queries, TILE), range(0, keys, TILE)):
        tile = shown[:, :, rows : rows + TILE, columns : columns + TILE]
        found += int(tile.flatten(2).any(2).sum()) * tile.shape[2] * tile.shape[3]
    return found


@pytest.mark.parametrize(
    ("program", "sizes"),
    [
        ("", ()),
        ("keep k <= q", ()),
        ("keep k <= q and k > q - n0", (70,)),
        ("keep k < n0", (100,)),
        ("keep k > q - 64 * (h + 1) and k <= q", ()),
        ("keep k <= q + 64 * b", ()),
        ("keep k <= q else -5", ()),
        ("keep k < 0", ()),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3, 200, 200), (2, 2, 130, 257), (1, 1, 1, 300), (1, 2, 64, 64)])
def test_tiles_that_a_mask_hides_do_not_count(
    program: str, sizes: tuple[int, ...], shape: tuple[int, int, int, int]
) -> None:
    found = computed_pairs(parse(program), *shape, sizes)
    assert found == brute_force(program, *shape, sizes)
    q, k = torch.zeros(*shape[:3], 8), torch.zeros(*shape[:2], shape[3], 8)
    v = torch.zeros(*shape[:2], shape[3], 5)
    assert counted(lambda: attngraph.attention(q, k, v, program, sizes=sizes)) == found * 2 * (8 + 5)


def test_many_tiles_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = computed_pairs(parse("keep k <= q"), 1, 4, 1000, 1000)
    monkeypatch.setattr("attngraph.meaning.masks.flops._AT_ONCE", 40)
    assert computed_pairs(parse("keep k <= q"), 1, 4, 1000, 1000) == whole


def test_pairs_are_counted_on_tensors_without_data_too() -> None:
    whole = computed_pairs(parse("keep k <= q + 1"), 1, 1, 70, 70)
    with FakeTensorMode():
        assert computed_pairs(parse("keep k <= q + 1"), 1, 1, 70, 70) == whole


def test_what_a_mask_reads_counts_as_if_it_hid_nothing() -> None:
    q = torch.zeros(2, 2, 128, 8)
    padding = torch.arange(128) < 10
    found = counted(lambda: attngraph.attention(q, q, q, "keep r0[k]", padding))
    assert found == 2 * 2 * 2 * 128 * 128 * 16


class Layer(nn.Module):
    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.masked = nn.Linear(16, 48), nn.Linear(16, 16), masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / 8**0.5
        if self.masked:
            i = torch.arange(x.shape[1])
            scores = scores.masked_fill(i > i[:, None], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_compiled_model_counts_as_the_unfused_one() -> None:
    model, x = Layer(), torch.randn(2, 70, 16)
    compiled = attngraph.compile(model)
    with torch.no_grad():
        first, second, eager = (counted(lambda run=run: run(x)) for run in (compiled, compiled, model))
    assert compiled.report.attention
    assert first == second == eager  # the first call compiles, which is not counted


def test_the_backward_pass_counts_the_scores_once_more() -> None:
    model, x = Layer(), torch.randn(2, 70, 16)
    compiled = attngraph.compile(model)
    compiled(x)
    again = 2 * 2 * 2 * 70 * 70 * 8
    assert counted(lambda: compiled(x).sum().backward()) == counted(lambda: model(x).sum().backward()) + again


def test_a_causal_model_counts_about_half_of_its_scores() -> None:
    model, x = Layer(masked=True), torch.randn(1, 640, 16)
    compiled = attngraph.compile(model)
    with torch.no_grad():
        compiled(x)
        found, eager = (counted(lambda run=run: run(x)) for run in (compiled, model))
    hidden = 10 * 9 // 2 * TILE * TILE
    assert eager - found == 2 * 2 * hidden * 16


def test_linear_attention_counts_its_products() -> None:
    q = torch.zeros(1, 2, 128, 8)
    products = 2 * 2 * 128 * 8 * 8  # k v^T summed over keys, and the queries with it
    assert counted(lambda: ops.linear_attention(q, q, q, [], [], "")) == 2 * products


@pytest.mark.parametrize("absorb", ["always", "never"])
def test_latent_attention_counts_what_its_order_of_products_takes(absorb: str) -> None:
    heads, nope, shared, rank, value, tokens = 4, 8, 3, 16, 6, 20
    q = torch.randn(2, heads, tokens, nope + shared)
    latent = torch.randn(2, 1, tokens, rank + shared)
    key_up, value_up = torch.randn(heads, nope, rank), torch.randn(heads, value, rank)
    found = counted(lambda: ops.latent_attention(q, latent, key_up, value_up, [0, rank], [], [], "", absorb))

    def by_hand() -> None:
        if absorb == "always":
            query = torch.cat([q[..., :nope] @ key_up, q[..., nope:]], -1)
            weights = (query @ latent.expand(-1, heads, -1, -1).mT).softmax(-1)
            (weights @ latent[..., :rank].expand(-1, heads, -1, -1)) @ value_up.mT
        else:
            k = latent[..., :rank] @ key_up.mT
            k = torch.cat([k, latent[..., rank:].expand(-1, heads, -1, -1)], -1)
            (q @ k.mT).softmax(-1) @ (latent[..., :rank] @ value_up.mT)

    assert found == counted(by_hand)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(11, 16), Layer(masked=True), nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids)))


def test_a_decoder_counts_its_new_tokens_over_all_kept_ones() -> None:
    decoder = attngraph.compile(Language().eval(), cache=True)
    ids = torch.randint(0, 11, (1, 70))
    _, state = decoder.prefill(ids)
    linears = 2 * (16 * 48 + 16 * 16 + 16 * 11)

    def step() -> None:
        decoder.decode(ids[:, :1], state)

    assert counted(step) == linears + 2 * 2 * 71 * 16
    assert counted(step) == linears + 2 * 2 * 72 * 16
