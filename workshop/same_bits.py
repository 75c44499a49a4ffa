"""Searches for a bit in which a decoder's logits depend on what a token is computed with, and what it costs.

    python -m workshop same-bits [--runs 40] [--only llama] [--json FILE]
    python -m workshop cost-of-order [--json FILE]

same-bits: of `consistent=True` and of the default, how many tokens had other logits than those computed one
by one from a cache, alone in a batch. Drawn are: how a text is cut into a prompt and chunks, how many rows
there are beside it and what they compute, which row it is, the number of threads, the layout and the size of
pages, and whether it is a whole sequence with padding. cost-of-order: prompts and single tokens of both in
turns.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import attngraph
from attngraph.cli.arguments import POSITIVE
from workshop.bench import models
from workshop.harness import Cell, Options, Row, Suite, in_turns, short

TOKENS, SOURCE, VOCABULARY = 120, 37, 97
"""Of the text whose tokens are compared, and of what an encoder is given."""


def stock(name: str, **given: Any) -> Callable[[], Any]:
    """A class of transformers, small."""

    def make() -> Any:
        import transformers

        sizes: dict[str, Any] = {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        }  # fmt: skip
        config = getattr(transformers, f"{name}Config")(**(sizes | given))
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()

    return make


def _seq2seq(name: str, **sizes: Any) -> Callable[[], Any]:
    """One with an encoder."""

    def make() -> Any:
        import transformers

        about = {"vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 1}
        config = getattr(transformers, f"{name}Config")(**(sizes | about))
        return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()

    return make


_GROUPED = {"num_key_value_heads": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": models.small_gpt2, "llama, grouped heads": stock("Llama", **_GROUPED),
    "mistral, window": stock("Mistral", **_GROUPED, sliding_window=9),
    "gemma2, softcap": stock("Gemma2", **_GROUPED, head_dim=16, sliding_window=9),
    "qwen3": stock("Qwen3", **_GROUPED, head_dim=24), "bloom, ALiBi": stock("Bloom", n_layer=2, n_head=4),
    "mixtral, experts": stock("Mixtral", **_GROUPED, num_local_experts=4),
    "deepseek-v3, latents and experts": stock(
        "DeepseekV3", num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=4, n_group=2,
        num_experts_per_tok=2, topk_group=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
    ),
    "mamba2, states": stock("Mamba2", num_heads=16, head_dim=8, state_size=16, n_groups=1, chunk_size=8),
    "lfm2, convolutions": stock(
        "Lfm2", **_GROUPED, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]
    ),
    "t5, encoder": _seq2seq("T5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4),
    "bart, encoder": _seq2seq(
        "Bart", d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=256,
    ),
    "llama, bfloat16": lambda: MODELS["llama, grouped heads"]().bfloat16(),
}  # fmt: skip
CACHES = ("llama, grouped heads", torch.bfloat16), ("llama, grouped heads", torch.int8), (
    "deepseek-v3, latents and experts", torch.int8
), ("lfm2, convolutions", torch.bfloat16), ("bart, encoder", torch.int8)  # fmt: skip
"""Models whose cache rounds, and to what."""


class Search:
    """One model and a text; `differing` counts tokens whose logits have other bits in a drawn way."""

    def __init__(
        self, make: Callable[[], Any], consistent: bool, seed: int = 0, kept: torch.dtype | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model, self.draw = make().eval(), random.Random(seed)
        self.consistent, self.kept = consistent, kept
        self.decoder = self._decoder(attngraph.CacheConfig(dtype=kept))
        self.whole = attngraph.compile(self.model, consistent=consistent)
        self.text = self._tokens(TOKENS)
        encodes = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        self.source = self._tokens(SOURCE) if encodes else None
        self.compared = self.differing = 0
        logits, state = self.decoder.prefill(self.text[None, :1], **self._given(1, 0))
        one_by_one = [logits[0, -1]]
        one_by_one += [
            self.decoder.decode(self.text[None, n : n + 1], state)[0, -1] for n in range(1, TOKENS)
        ]
        self.wanted = torch.stack(one_by_one)

    @functools.cache  # noqa: B019  (a search ends with its process)
    def _decoder(self, config: attngraph.CacheConfig) -> attngraph.Decoder:
        made: attngraph.Decoder = attngraph.compile(self.model, consistent=self.consistent, cache=config)
        return made

    def _tokens(self, count: int) -> Tensor:
        return torch.tensor([self.draw.randrange(1, VOCABULARY) for _ in range(count)], dtype=torch.int64)

    def _given(self, rows: int, own: int) -> dict[str, Tensor]:
        """What the rows' encoder is given, where there is one: texts with padding on the right."""
        if self.source is None:
            return {}
        texts = [
            self.source if r == own else self._tokens(self.draw.randint(1, 2 * SOURCE)) for r in range(rows)
        ]
        ids = torch.zeros(rows, max(map(len, texts)), dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def _compare(self, found: Tensor, first: int) -> None:
        wanted = self.wanted[first : first + len(found)]
        self.compared += len(found)
        self.differing += int((found != wanted).any(-1).sum())

    def run(self) -> None:
        """One drawn way."""
        torch.set_num_threads(self.draw.randint(1, 2))
        if self.draw.random() < 0.2 and self.kept is None:
            return self._padded()
        decoder = self.decoder
        if self.draw.random() < 0.2:
            page = self.draw.choice((4, 48))
            config = attngraph.CacheConfig(layout="paged", page=page, max_length=2 * TOKENS, dtype=self.kept)
            decoder = self._decoder(config)
        rows, own = self.draw.randint(1, 4), 0
        own = self.draw.randrange(rows)
        at = self.draw.randint(1, TOKENS)
        prompts = [
            self.text[:at] if r == own else self._tokens(self.draw.randint(1, 90)) for r in range(rows)
        ]
        logits, state = decoder.prefill(prompts, **self._given(rows, own))
        self._compare(logits[own, :at], 0)
        while at < TOKENS:
            count = min(self.draw.randint(1, 40), TOKENS - at)
            chunk = self.text[at : at + count]
            given = [chunk if r == own else self._tokens(self.draw.randint(0, 6)) for r in range(rows)]
            self._compare(decoder.decode(given, state)[own, :count], at)
            at += count
        return None

    def _padded(self) -> None:
        """A whole sequence beside others, padded on the right."""
        count, rows = self.draw.randint(1, TOKENS), self.draw.randint(1, 3)
        own = self.draw.randrange(rows)
        ids, mask = torch.zeros(rows, TOKENS, dtype=torch.int64), torch.zeros(rows, TOKENS, dtype=torch.int64)
        for row in range(rows):
            text = self.text[:count] if row == own else self._tokens(self.draw.randint(1, TOKENS))
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        given: dict[str, Tensor] = {"input_ids": ids, "attention_mask": mask}
        if self.source is not None:
            given = {f"decoder_{name}": value for name, value in given.items()} | self._given(rows, own)
        with torch.no_grad():
            found = self.whole(**given)
        self._compare(getattr(found, "logits", found)[own, :count], 0)


def _searched(make: Callable[[], Any], runs: int, kept: torch.dtype | None = None) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    threads = torch.get_num_threads()
    for name, consistent in (("consistent", True), ("default", False)):
        try:
            search = Search(make, consistent, kept=kept)
            for _ in range(runs):
                search.run()
            named = ", ".join(search.decoder.report.unordered or ()) or "none"
            rows[name] = {
                "runs": runs, "tokens": search.compared, "differing": search.differing,
                **({"in no order": named} if consistent else {}),
            }  # fmt: skip
        except Exception as problem:
            rows[name] = {"problem": short(problem)}
        torch.set_num_threads(threads)
    return rows


def _cells(options: Options) -> Iterator[Cell]:
    chosen = {"gpt2": models.small_gpt2} if options.small else MODELS
    for name, make in chosen.items():
        yield Cell(name, lambda make=make: _searched(make, options.runs))  # type: ignore[misc]
    for name, kept in () if options.small else CACHES:
        about = f"{name}, kept as {str(kept).removeprefix('torch.')}"
        yield Cell(about, lambda name=name, kept=kept: _searched(MODELS[name], options.runs, kept))  # type: ignore[misc]


def _runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=POSITIVE, default=40, help="drawn ways of each (default 40)")


SEARCH = Suite(
    "same-bits", __doc__, _cells, _runs,
    fails=lambda rows: any(row["name"] == "consistent" and row.get("differing", 1) for row in rows),
).main  # fmt: skip


# --- what it costs ---


_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {}, "consistent": {"consistent": True}, "frozen": {"freeze": True},
    "both": {"consistent": True, "freeze": True},
}  # fmt: skip


def _costs(make: Callable[[], Any], prompt: int) -> Iterator[Cell]:
    built: dict[str, attngraph.Decoder] = {}

    def each() -> dict[str, attngraph.Decoder]:
        if not built:
            model = make().eval()
            for name, options in _OPTIONS.items():
                built[name] = attngraph.compile(model, cache=True, **options)
        return built

    def ids(rows: int) -> Tensor:
        return torch.randint(0, 60, (rows, prompt))

    def prompts(rows: int) -> dict[str, Row]:
        given = ids(rows)
        return in_turns({name: lambda d=d: d.generate(given, 1) for name, d in each().items()}, 9, 3)  # type: ignore[misc]

    def tokens(rows: int) -> dict[str, Row]:
        given, last = ids(rows), torch.zeros(rows, 1, dtype=torch.int64)
        states = {name: d.prefill(given)[1] for name, d in each().items()}
        calls = {name: lambda n=name, d=d: d.decode(last, states[n]) for name, d in each().items()}  # type: ignore[misc]
        return in_turns(calls, 25, 5)

    for rows in (1, 8):
        yield Cell(f"prompt of {prompt} tokens, {rows} row(s)", lambda rows=rows: prompts(rows))  # type: ignore[misc]
        yield Cell(f"one token behind {prompt}, {rows} row(s)", lambda rows=rows: tokens(rows))  # type: ignore[misc]


def _cost_cells(options: Options) -> Iterator[Cell]:
    if options.small:
        yield from _costs(models.tiny_llama, 24)
        return
    for name, make in (("gpt2", lambda: models.gpt2(layers=6)), ("llama", lambda: models.llama(layers=6))):
        for prompt in (128, 512):
            for cell in _costs(make, prompt):
                yield Cell(f"{name}, {cell.name}", cell.measure)


COST = Suite("cost-of-order", __doc__, _cost_cells, base="default").main
