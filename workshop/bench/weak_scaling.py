"""What a rank of 1 to 1,024 holds and receives of large models, beside Megatron's formulas: counted, not run.

    python -m workshop weak-scaling [--models llama deepseek]

Eight ranks divide heads and units, the others tokens. Every layer of a kind is the same, so models are built
with few layers of each kind, and what one more layer adds is counted as often as the model has it. Nothing is
proved here (`api/plan.py`): the same passes are proved on small models wherever they run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from attngraph.api.plan import Planner
from attngraph.api.plan_memory import WithoutMemory, fill
from attngraph.report.plan import Share
from attngraph.report.words import size
from workshop.harness import Cell, Options, Row, Suite

RANKS = (1, 8, 16, 64, 256, 1024)
HEADS = 8
"""How many ranks divide heads and units."""
TOKENS = 1 << 14
FIGURES = ("weights", "sent", "received")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model by the numbers of its layers of each kind, and what Megatron-LM would hold and send of it.

    Attributes:
        layers: how many layers of each kind it has. build: makes a model with so many of each.
        rest, block: parameters outside of layers, and of a layer of each kind, that Megatron divides.
        width: of the residual. keys: elements of keys and values of a token, of a layer.
    """

    layers: tuple[int, ...]
    build: Callable[[tuple[int, ...]], nn.Module]
    rest: int
    block: tuple[int, ...]
    width: int
    keys: int


def _llama(layers: tuple[int, ...]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    (count,) = layers
    model: nn.Module = LlamaForCausalLM(LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
        num_hidden_layers=count, vocab_size=128256, max_position_embeddings=TOKENS, use_cache=False,
    ))  # fmt: skip
    return model


def _deepseek(layers: tuple[int, ...]) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    dense, sparse = layers
    model: nn.Module = DeepseekV3ForCausalLM(DeepseekV3Config(
        num_hidden_layers=dense + sparse, first_k_dense_replace=dense, max_position_embeddings=TOKENS,
        use_cache=False,
    ))  # fmt: skip
    return model


_MLA = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
SHAPES = {
    "llama": Shape(
        (80,), _llama, 2 * 128256 * 8192, (2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672,), 8192, 2 * 8 * 128
    ),
    "deepseek": Shape(
        (3, 58), _deepseek, 2 * 129280 * 7168,
        (_MLA + 3 * 7168 * 18432, _MLA + 257 * 3 * 7168 * 2048 + 256 * 7168), 7168, 128 * (192 + 128),
    ),
}  # fmt: skip


def figures(shape: Shape) -> Iterator[tuple[int, dict[str, float]]]:
    """For each number of ranks what one holds and, for each token of its own, sends and receives."""
    ones = (1,) * len(shape.layers)
    planners = {ones: _planner(shape, ones)}
    for kind in range(len(shape.layers)):
        more = tuple(n + (kind == place) for place, n in enumerate(ones))
        planners[more] = _planner(shape, more)
    for ranks in RANKS:
        heads, tokens = min(ranks, HEADS), max(1, ranks // HEADS)
        shares = {layers: planner.share(heads, tokens) for layers, planner in planners.items()}
        first = _numbers(shares.pop(ones), tokens)
        total = dict(first)
        for count, share in zip(shape.layers, shares.values(), strict=True):
            longer = _numbers(share, tokens)
            for name in FIGURES:
                total[name] += (count - 1) * (longer[name] - first[name])
        yield ranks, total


def _planner(shape: Shape, layers: tuple[int, ...]) -> Planner:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with WithoutMemory():
            model = shape.build(layers).eval()
    finally:
        torch.set_default_dtype(before)
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    fill(model, ids)
    with torch.no_grad():
        return Planner(_Loss(model), (ids,), print_stage, proves=False, decodes=False)


class _Loss(nn.Module):
    """The loss of a model on its own input: what is trained returns one number, not all logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, labels=ids).loss
        return loss


def print_stage(stage: str) -> None:
    """What the planner does at the moment is of no interest here."""


def _numbers(share: Share, tokens: int) -> dict[str, float]:
    """Of a rank, and for each token of its own."""
    return {"weights": share.weights, "sent": share.sent * tokens, "received": share.received * tokens}


def megatron(shape: Shape, ranks: int) -> dict[str, float]:
    """Megatron-LM: each of t ranks has 1/t of the matrices, and adds up two values of a token's width a layer
    and one for the embedding, in rings (Shoeybi et al. 2019, section 3); each of c ranks that divide tokens
    receives the keys and values of all others (its context parallelism, a ring over all of them)."""
    heads, tokens = min(ranks, HEADS), max(1, ranks // HEADS)
    weights = shape.rest + sum(n * each for n, each in zip(shape.layers, shape.block, strict=True))
    depth, item = sum(shape.layers), 2
    sums = (2 * depth + 1) * 2 * (heads - 1) / heads * shape.width * item
    keys = depth * shape.keys / heads * item * (tokens - 1)
    return {"weights": weights * item / heads, "received": sums + keys}


def beside(name: str) -> dict[int, dict[str, Row]]:
    """Of each number of ranks what one holds and receives for each token of its own."""

    def told(found: dict[str, float]) -> Row:
        return {key: size(found[key]) for key in ("weights", "received")}

    shape = SHAPES[name]
    return {
        ranks: {"attngraph": told(found), "Megatron": told(megatron(shape, ranks))}
        for ranks, found in figures(shape)
    }


def cells(options: Options) -> Iterator[Cell]:
    for name in options.models:
        counted = functools.cache(functools.partial(beside, name))
        for ranks in RANKS:
            yield Cell(f"{name}, {ranks} ranks", lambda ranks=ranks, counted=counted: counted()[ranks])  # type: ignore[misc]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))


MAIN = Suite("weak-scaling", __doc__, cells, _arguments).main
