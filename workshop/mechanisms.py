"""What decoders keep, and whether they give the model's tokens: attention and its relatives, one by one.

    python -m workshop mechanisms --write      measures what is missing, and writes docs/mechanisms.md
    python -m workshop mechanisms --only rwkv  one of them, to look at

A decoder is derived of each variant of the gallery that has one, and of stock models, small and with random
weights. Compared are 64 greedy tokens of two prompts with those of the whole model, computed anew for each
token; and a batch of prompts of unequal lengths, padded on the left, with each prompt alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import attngraph
from workshop.gallery.command import plain
from workshop.gallery.variants import VARIANTS, WORDS, model_of
from workshop.harness import Cell, Options, Row, Suite, in_one_cell, markdown
from workshop.processes import quietly
from workshop.same_bits import MODELS, VOCABULARY, stock
from workshop.tables import DOCS, run_of, written

FILE, PAGE = DOCS / "measured" / "mechanisms.json", DOCS / "mechanisms.md"
NEW, PROMPT, SHORT = 64, 13, 5


def _deepseek_v4(*kinds: str) -> Callable[[], Any]:
    layers = [f"{kind}_attention" for kind in kinds]
    return stock(
        "DeepseekV4", hidden_size=32, moe_intermediate_size=16, num_hidden_layers=len(kinds), head_dim=16,
        q_lora_rank=16, num_experts_per_tok=2, n_routed_experts=4, hc_mult=2, hc_sinkhorn_iters=2,
        num_hash_layers=0, sliding_window=8,
        o_groups=2, o_lora_rank=8, index_n_heads=16, index_head_dim=8, index_topk=3,
        partial_rotary_factor=0.5, layer_types=layers,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    )  # fmt: skip


def _peft(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        import peft

        learned = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=6)
        return peft.get_peft_model(MODELS["llama, grouped heads"](), learned).eval()

    return make


_GROUPED = {"num_key_value_heads": 2}
STOCK: dict[str, Callable[[], Any]] = {
    **{name: make for name, make in MODELS.items() if "encoder" not in name and "bfloat16" not in name},
    "olmo3, windows and all tokens": stock("Olmo3", **_GROUPED, sliding_window=9),
    "gpt-oss, sinks": stock("GptOss", **_GROUPED, head_dim=16, num_local_experts=4, sliding_window=9),
    "qwen3-next, delta rule": stock(
        "Qwen3Next", **_GROUPED, head_dim=16, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
    "mamba, states": stock("Mamba", state_size=8),
    "rwkv": stock("Rwkv", attention_hidden_size=64),
    "recurrentgemma": stock(
        "RecurrentGemma", **_GROUPED, num_hidden_layers=3, lru_width=64, attention_window_size=9
    ),
    "deepseek-v4, 4 layers": _deepseek_v4(
        "sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse"
    ),
    "prompt tuning (PEFT)": _peft("PromptTuningConfig"),
    "prefix tuning (PEFT)": _peft("PrefixTuningConfig"),
}  # fmt: skip


def measured(name: str, make: Callable[[], Any], words: int) -> dict[str, Row]:
    """What a decoder keeps, and how many of its tokens are those of the whole model."""
    torch.manual_seed(0)
    model, draw = make().eval(), torch.Generator().manual_seed(1)
    ids = torch.randint(1, words, (2, PROMPT), generator=draw)
    with torch.no_grad():
        start = time.perf_counter()
        try:
            decoder: Any = attngraph.compile(model, cache=True)
            decoder.prefill(ids)
        except attngraph.NoDecoderError as problem:
            return {"attngraph": {"refused": plain(problem.reason)}}
        seconds = time.perf_counter() - start
        found, wanted = decoder.generate(ids, NEW), ids
        for _ in range(NEW):
            wanted = torch.cat([wanted, _logits(model(wanted))[:, -1:].argmax(-1)], 1)
        mask = torch.ones_like(ids)
        mask[1, : PROMPT - SHORT] = 0
        together = decoder.generate(ids, NEW, attention_mask=mask)[:, PROMPT:]
        alone = [decoder.generate(ids[:1], NEW)[0, PROMPT:]]
        alone.append(decoder.generate(ids[1:, PROMPT - SHORT :], NEW)[0, SHORT:])
        kept = decoder.report.cache
    return {"attngraph": {
        "token": sum(size // each for _, size, window, each in kept.stores if window is None),
        "row": kept.bytes_per_row, "begins": kept.begins, "anew": len(kept.anew), "error": kept.error,
        "equal": int((found == wanted)[:, PROMPT:].sum()), "derived": seconds,
        "padded": int((together == torch.stack(alone)).sum()), "of": 2 * NEW,
    }}  # fmt: skip


def _logits(result: Any) -> Tensor:
    found: Tensor = (
        result if isinstance(result, Tensor) else result[0] if isinstance(result, tuple) else result.logits
    )
    return found


def cells(_: Options) -> Iterator[Cell]:
    """A cell for each mechanism."""
    quietly()
    for name, make in STOCK.items():
        yield Cell(name, functools.partial(measured, name, make, VOCABULARY))
    for name in VARIANTS:
        yield Cell(name, functools.partial(measured, name, functools.partial(model_of, name), WORDS))


def table() -> str:
    """The table of the page, from the file."""
    found: Row = json.loads(FILE.read_text(encoding="utf-8"))
    rows = {row["cell"]: row for row in found["rows"]}
    lines = [
        ["mechanism", "bytes a token", "bytes a row", "as the whole model", "padded as alone", "derived, s"]
    ]
    for cell, row in rows.items():
        if "refused" in row:
            lines.append([f"**{cell}**", in_one_cell(f"no decoder: {row['refused']}"), "", "", "", ""])
        elif "of" in row:
            notes = [f"begins with {row['begins']} places"] if row["begins"] else []
            notes += ["computed from all that is kept"] if row["anew"] else []
            about = f" ({', '.join(notes)})" if notes else ""
            lines.append([
                f"**{cell}**{about}", f"{row['token']:,}", f"{row['row']:,}",
                f"{row['equal']} of {row['of']}", f"{row['padded']} of {row['of']}", f"{row['derived']:.1f}",
            ])  # fmt: skip
        else:
            lines.append([f"**{cell}**", in_one_cell(f"lost: {row}"), "", "", "", ""])
    decoders = [row for row in rows.values() if "of" in row]
    equal = sum(row["equal"] == row["of"] for row in decoders)
    padded = sum(row["padded"] == row["of"] for row in decoders)
    summary = (
        f"{len(decoders)} of {len(rows)} have a decoder. Of {equal} of these all {2 * NEW} tokens are those "
        f"of the whole model; of {padded} those of a padded batch are those of its rows alone. "
        f"{run_of(found)}"
    )
    return f"{summary}\n\n{markdown(lines)}"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="of what the file has not, and write the table")


def _after(options: Options, rows: Sequence[Row]) -> str:
    return "\n".join(f"{row['cell']}: {row}" for row in rows)


SUITE = Suite("mechanisms", __doc__, cells, _arguments, base="attngraph", after=_after)


def main(argv: Sequence[str]) -> int:
    """Measure, and with --write bring the file and the page up to date."""
    is_written = "--write" in argv
    code = SUITE.main([*argv, *(["--json", str(FILE), "--resume"] if is_written else [])])
    if is_written:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return code
