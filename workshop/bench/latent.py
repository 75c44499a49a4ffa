"""Decoding multi-head latent attention on the CPU: absorbed, expanded, and transformers' own cache.

    python -m workshop mla [--lengths 1024 4096 16384] [--layers 2] [--json FILE]

DeepSeek-V3 at an eighth of its width and heads (16 heads, latent 512 + 64), random weights, float32, dense
feed-forward layers. For each length the caches are filled with random values, then one token is decoded by
each candidate in turn within one run:

    absorbed        the latent is kept, queries and results are projected (`absorb="auto"`)
    expanded        keys and values of every head are kept (`absorb="never"`)
    transformers    the latent is kept and projected up again at every token

Operations are those of matrix products as torch's own counter sees them, ours with `backend="reference"`,
which computes everything by plain products; beside them stand the formulas of `attngraph/ir/ops/cost.py`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import attngraph
from workshop.bench import models
from workshop.harness import Cell, Options, Row, Suite, in_turns

ROUNDS, SKIPPED = 17, 2


def filled(decoder: attngraph.Decoder, length: int) -> attngraph.KVCache:
    """A state of one row that holds `length` tokens of random values."""
    _, state = decoder.prefill(torch.zeros(1, 2, dtype=torch.int64))
    state.reset()
    state.reserve([length])
    news: dict[str, Tensor] = {}
    for store in state.plan.stores:
        shape = list(store.shape)
        shape[store.row_dim], shape[store.token_dim] = 1, length
        news[store.name] = torch.randn(shape, dtype=store.dtype)
    state.write(news, state.inputs([length]), [length])
    return state


def their_cache(theirs: Any, length: int) -> Any:
    from transformers import DynamicCache

    cache, config = DynamicCache(config=theirs.config), theirs.config
    for layer in range(config.num_hidden_layers):
        parts = (torch.randn(1, 1, length, n) for n in (config.kv_lora_rank, config.qk_rope_head_dim))
        cache.update(*parts, layer)
    return cache


def count(call: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def formulas(entry: Any, config: Any, linear: int, length: int) -> dict[str, int]:
    """Operations of one token after `length` cached ones, by the formulas: `linear` are those of all linear
    layers as the model has them, in which each token is projected up once."""
    layers, keys = config.num_hidden_layers, length + 1
    return {
        "absorbed": linear + layers * keys * entry.pair_absorbed,
        "expanded": linear + layers * keys * entry.pair_expanded,
        "transformers": linear + layers * (keys * entry.pair_expanded + length * entry.up),
    }


def measured(theirs: Any, decoders: dict[str, attngraph.Decoder], length: int) -> dict[str, Row]:
    from attngraph.hf import CACHE

    token = torch.zeros(1, 1, dtype=torch.int64)
    states = {name: filled(decoder, length) for name, decoder in decoders.items()}
    cache, config = their_cache(theirs, length), theirs.config
    candidates: dict[str, Callable[[], object]] = {
        name: functools.partial(_token, decoders[name], token, state) for name, state in states.items()
    }

    def transformers() -> None:
        theirs(token, **{CACHE: cache}, use_cache=True)
        cache.crop(-1)

    found = in_turns({**candidates, "transformers": transformers}, ROUNDS, SKIPPED)
    kept = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    counted = operations(theirs, length)
    for name, row in found.items():
        row["bytes_per_token"] = states[name].bytes_per_token if name in states else kept
        row |= {"flop": counted["counted"][name], "formula": counted["formula"][name]}
    return found


def _token(decoder: attngraph.Decoder, token: Tensor, state: attngraph.KVCache) -> None:
    length = state.lengths[0]
    decoder.decode(token, state)
    state.crop(length)


def operations(theirs: Any, length: int) -> dict[str, dict[str, int]]:
    """Operations as counted, and by the formulas."""
    from attngraph.hf import CACHE

    token = torch.zeros(1, 1, dtype=torch.int64)
    found: dict[str, int] = {}
    entry: Any = None
    for name, absorb in (("absorbed", "always"), ("expanded", "never")):
        decoder = attngraph.compile(theirs, cache=True, backend="reference", absorb=absorb)
        state = filled(decoder, length)
        found[name] = count(functools.partial(decoder.decode, token, state))
        entry = entry or decoder.report.attention[0].latent
    cache = their_cache(theirs, length)
    found["transformers"] = count(lambda: theirs(token, **{CACHE: cache}, use_cache=True))
    weights = [m for m in theirs.modules() if isinstance(m, nn.Linear)]
    linear = sum(2 * m.in_features * m.out_features for m in weights)
    return {"counted": found, "formula": formulas(entry, theirs.config, linear, length)}


def cells(options: Options) -> Iterator[Cell]:
    lengths, layers = ([16], 1) if options.small else (options.lengths, options.layers)

    @functools.cache
    def made() -> tuple[Any, dict[str, attngraph.Decoder]]:
        theirs = models.made(lambda: models.deepseek(layers))
        ways = {"absorbed": "auto", "expanded": "never"}
        return theirs, {
            name: attngraph.compile(theirs, cache=True, absorb=absorb) for name, absorb in ways.items()
        }

    for length in lengths:
        yield Cell(f"{length} kept", lambda length=length: measured(*made(), length))  # type: ignore[misc]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--layers", type=int, default=2)


SUITE = Suite("mla", __doc__, cells, _arguments, base="transformers")
MAIN = SUITE.main
