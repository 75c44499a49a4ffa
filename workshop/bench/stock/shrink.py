"""Makes a default configuration of transformers small, by rules about the names of its settings.

A setting belongs to a role (layers, heads, widths, experts, vocabulary, ...) that its name tells, and every
setting of a role gets the same small number; one that equalled a number which was replaced follows it. No
rule knows a class. Where the result cannot be built, settings are given back their defaults one at a time
(the suite decides what can be built).
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]
Path = tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """The small numbers. `other`: an upper bound for large numbers of no known role, or None to keep those;
    `fill`: whether settings that are None by default and have a role get that role's number; `each`: how many
    layers of each kind stay."""

    hidden: int = 64
    heads: int = 4
    key_heads: int = 2
    width: int = 16
    inner: int = 64
    layers: int = 2
    other: int | None = None
    fill: bool = False
    each: int = 1


ATTEMPTS = (
    Sizes(),
    Sizes(fill=True),
    Sizes(key_heads=4),
    Sizes(key_heads=4, other=32, fill=True),
    Sizes(layers=4, each=2),
    Sizes(layers=6, fill=True),
    Sizes(heads=2, key_heads=2, width=32, fill=True),
    Sizes(heads=2, key_heads=2, width=32, other=32),
)
"""What is tried in turn."""
VOCABULARY, POSITIONS, WINDOW, RANK = 96, 128, 4, 16
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ENDINGS = {"pad": 0, "bos": 1, "eos": 2}


def role(name: str) -> str:
    """What a setting counts, told by its name; "" if the name does not tell."""
    return next((found for found, pattern in _ROLES.items() if re.search(pattern, name)), "")


_ROLES = {
    "token": r"_token_(ids?|index)$",
    "vocabulary": r"vocab",
    "positions": r"position_embeddings$|n_positions$|max_seq|seq_len|seqlen|context_length$|^n_ctx$"
    r"|max_.*positions$",
    "layers": r"^(num_hidden_layers|n_layers?|num_layers|layers|depth|num_blocks|.*_num_hidden_layers)$"
    r"|(en|de)coder_layers$",
    "dense layers": r"first_k_dense|num_dense_layers|dense_layers$|num_kv_shared_layers",
    "period": r"(interval|period|every_n_layers|_step|_pattern|_freq|layer_group_size)$",
    "offset": r"_offset$",
    "key heads": r"(kv|key_value|key|query_groups).*heads?$|num_query_groups$|^n_head_kv$|head_kv$",
    "heads": r"heads?$|^n_head",
    "codebooks": r"num_codebooks$",
    "rotary": r"rotary_dim$",
    "chosen": r"(experts_per_tok|top_?k|_topk|num_selected.*|experts_per_token|moe_k)$",
    "groups": r"^n_groups?$|^num_expert_groups?$",
    "chosen groups": r"topk_groups?$",
    "shared experts": r"shared_experts?$",
    "experts": r"experts$|expert_num$",
    "width": r"(head_dim|head_size|d_head|dim_head|head_dims?|d_kv|kv_channels|attention_head_dim)$",
    "rank": r"rank$|_lowrank$|^d_rel$|lora_dim$",
    "window": r"window|chunk_size$|block_size$|^local_attention$|chunk_length$",
    "inner": r"intermediate_size|ffn|ff$|^d_inner|n_inner|feed_forward_size|_ff_dim|inner_dim|mlp_dim",
    "hidden": r"hidden_size$|^d_model$|^n_embd$|dim_model$|^embed_dim$|embedding_(dim|size)$|proj_dim$"
    r"|^emb_dim$|lru_width|per_layer_input$|hidden_dim$|^embed_size$|ple_embed_dim$|^hidden_size",
}
"""Roles, by the first pattern that the name of a setting matches."""
_HIDDEN = ("hidden_size", "d_model", "n_embd")


def shrunk(settings: Mapping[str, Any], sizes: Sizes) -> Settings:
    """A copy of a configuration's settings with small numbers, in nested configurations too."""
    found: Settings = copy.deepcopy(dict(settings))
    widths = [part[n] for part in _parts(found) for n in _HIDDEN if _is_int(part.get(n))]
    base = max(widths, key=widths.count, default=0)
    for part in list(_parts(found)):
        _shrink_part(part, sizes, base)
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any], at: Path = ()) -> Iterator[Path]:
    """The settings that differ."""
    nested = _nested(after)
    for name, value in after.items():
        old = before.get(name)
        if name in nested and isinstance(old, dict):
            yield from changes(old, value, (*at, name))
        elif value != old:
            yield (*at, name)


def given_back(settings: Settings, before: Mapping[str, Any], path: Path) -> Settings:
    """The settings with one of them as it was before."""
    found = copy.deepcopy(settings)
    inner: Any = found
    old: Any = before
    for name in path[:-1]:
        inner, old = inner[name], old[name]
    inner[path[-1]] = copy.deepcopy(old.get(path[-1]))
    return found


def _parts(settings: Settings) -> Iterator[Settings]:
    """This configuration and those nested in it."""
    yield settings
    for value in _nested(settings).values():
        yield from _parts(value)


def _nested(settings: Mapping[str, Any]) -> dict[str, Settings]:
    """The configurations in a configuration: they say of which type of model they are."""
    return {n: v for n, v in settings.items() if not _is_table(n) and is_configuration(v)}


def is_configuration(value: object) -> bool:
    """Whether a setting is a configuration of its own: settings with names, not by layer."""
    return isinstance(value, dict) and bool(value) and all(
        isinstance(key, str) and not key.isdigit() for key in value
    )  # fmt: skip


def _is_table(name: str) -> bool:
    return name.startswith("rope_") or name == "compress_rates"


def _shrink_part(part: Settings, sizes: Sizes, base: int) -> None:
    before = dict(part)
    kept = _kept_layers(before, sizes)
    renamed: dict[int, int] = {}
    free = iter(range(VOCABULARY - 1, 0, -1))
    for name, value in before.items():
        if isinstance(value, bool):
            part[name] = True if name == "is_decoder" else value
        elif isinstance(value, int):
            part[name] = _number(name, value, before, sizes, len(kept), free, base)
            if part[name] != value and value >= 64 and role(name) in ("hidden", "width", "inner"):
                renamed.setdefault(value, part[name])
        elif isinstance(value, (list, tuple)) and value:
            part[name] = _entries(name, list(value), before, sizes, kept, free)
        elif isinstance(value, dict) and value and all(_is_layer(key) for key in value):
            part[name] = _of_layers(value, before, sizes, kept)
        elif value is None and sizes.fill:
            part[name] = _filled(name, before, sizes, len(kept))
    for name, value in before.items():
        if isinstance(value, int) and not isinstance(value, bool) and not role(name) and value >= 64:
            bound = value if sizes.other is None else min(value, sizes.other)
            part[name] = renamed.get(value, bound)
    if sizes.fill and before.get("rope_parameters") == {} and isinstance(before.get("layer_types"), list):
        part["rope_parameters"] = {kind: dict(_ROPE) for kind in before["layer_types"]}
    for name in (n for n in before if _is_table(n) and isinstance(before[n], dict)):
        part[name] = _rotary(part[name], before, part)


def _number(
    name: str, value: int, part: Settings, sizes: Sizes, layers: int, free: Iterator[int], base: int = 0
) -> int:
    """The small number for a setting. Nothing grows, except what has to fit a number that stays."""
    if value <= 0:
        return value
    match role(name):
        case "token":
            return _token(name, value, free)
        case "layers":
            return layers
        case "dense layers":
            every = value >= max(
                (v for n, v in part.items() if role(n) == "layers" and _is_int(v)), default=0
            )
            return layers if every else 1
        case "hidden":
            return sizes.hidden * (value // base if base and value % base == 0 else 1)
        case "heads":
            return min(value, sizes.heads) if value > 1 else value
        case "key heads":
            grouped = value < max(
                (v for n, v in part.items() if role(n) == "heads" and _is_int(v)), default=0
            )
            return 1 if value == 1 else sizes.key_heads if grouped else sizes.heads
        case "width":
            return _width(name, value, part, sizes, base)
        case kind:
            small = {
                "vocabulary": VOCABULARY, "positions": POSITIONS, "period": 2, "offset": 1,
                "chosen": 2, "codebooks": 1, "rotary": sizes.width // 2, "groups": 2,
                "chosen groups": 1, "shared experts": 1, "experts": 4, "rank": RANK,
                "window": WINDOW, "inner": sizes.inner,
            }  # fmt: skip
            return min(value, small.get(kind, value))


def _token(name: str, value: int, free: Iterator[int]) -> int:
    """A special token's small number: its own, one of the usual ones, or one that no other has."""
    if value < VOCABULARY // 2:
        return value
    return next((n for start, n in _ENDINGS.items() if name.startswith(start)), None) or next(free)


def _width(name: str, value: int, part: Settings, sizes: Sizes, base: int) -> int:
    """The width of a head: the sum of its parts where it is, in the default, the sum of parts."""
    single = [e for v in part.values() if isinstance(v, dict) for e in v.values() if isinstance(e, dict)]
    halves = [v for p in (part, *single) for n, v in p.items()
              if n != name and re.match("qk_.*(nope|rope)", n) and _is_int(v)]  # fmt: skip
    if any(a + b == value for a, b in itertools.combinations(halves, 2)):
        return 2 * sizes.width
    own = next((part[n] for n in ("hidden_size", "d_model") if _is_int(part.get(n))), None)
    heads = next((part[n] for n in ("num_attention_heads", "n_head") if _is_int(part.get(n))), None)
    if own and heads and value * heads in (own, 2 * own, 4 * own):
        wide = sizes.hidden * (own // base if base and own % base == 0 else 1)
        scaled: int = wide * (value * heads // own) // min(heads, sizes.heads)
        return scaled
    return min(value, sizes.width)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- lists ---


def _kept_layers(part: Settings, sizes: Sizes) -> list[int]:
    """Which layers stay: the first of each kind that the lists of kinds tell, and at least `sizes.layers`."""
    count = next((v for n, v in part.items() if role(n) == "layers" and _is_int(v)), sizes.layers)
    lists = [v for v in part.values() if isinstance(v, (list, tuple)) and len(v) == count
             and all(isinstance(e, (str, int)) for e in v)]  # fmt: skip
    tables = [{int(k): str(e) for k, e in v.items()} for v in part.values()
              if isinstance(v, dict) and v and all(_is_layer(key) for key in v)]  # fmt: skip
    kinds = [
        (*(str(v[n]) for v in lists if len(set(map(str, v))) < count), *(t.get(n) for t in tables))
        for n in range(count)
    ]
    kept = [n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < sizes.each and len(set(kinds)) > 1]
    more = iter(range(count))
    while len(kept) < min(sizes.layers, count):
        n = next(more)
        kept = sorted({*kept, n})
    return kept


def _entries(
    name: str, value: list[Any], part: Settings, sizes: Sizes, kept: list[int], free: Iterator[int]
) -> list[Any]:
    """A list with an entry for every layer, or one that names layers, for the layers that stay."""
    count = next((v for n, v in part.items() if role(n) == "layers" and _is_int(v)), None)
    if role(name) == "token" or name.endswith("suppress_tokens"):
        return [min(n, VOCABULARY - 1) if _is_int(n) else n for n in value]
    if count is not None and len(value) == count:
        entries = [value[n] for n in kept]
        return [
            _number(name, e, part, sizes, len(kept), free) if _is_int(e) and e > 8 else e for e in entries
        ]
    names_layers = re.search(r"layers$|idxs$|indices$|indexes$|layer_ids$", name)
    if names_layers and count is not None and all(_is_int(n) and n < count for n in value):
        return [place for place, n in enumerate(kept) if n in value]
    return value


def _is_layer(key: object) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdigit())


def _of_layers(table: Mapping[Any, Any], part: Settings, sizes: Sizes, kept: list[int]) -> Settings:
    """Settings of single layers, for the layers that stay."""
    found: Settings = {}
    for key, value in table.items():
        if int(key) in kept:
            own = {**part, **value} if isinstance(value, dict) else {}
            small = {n: _number(n, v, own, sizes, len(kept), iter(())) if _is_int(v) else v
                     for n, v in value.items()} if isinstance(value, dict) else value  # fmt: skip
            found[str(kept.index(int(key)))] = small
    return found


def _filled(name: str, part: Settings, sizes: Sizes, layers: int) -> Any:
    """A number for a setting that has none, or a name that a list of names has."""
    if name == "layer_types":
        return ["full_attention"] * layers
    choices = part.get(name.removeprefix("default_") + "s")
    if name.startswith("default_") and isinstance(choices, (list, tuple)):
        return choices[0]
    if name.startswith("clip_"):
        return 8.0
    if name.endswith(("_budget", "_ratio")):
        return {"_budget": 4, "_ratio": 2}[name[name.rindex("_") :]]
    small = {
        "heads": sizes.heads, "key heads": 1, "width": sizes.width, "chosen": 2, "groups": 2,
        "chosen groups": 1, "experts": 4, "shared experts": 1,
    }  # fmt: skip
    return small.get(role(name))


def _rotary(table: Settings, before: Settings, after: Settings) -> Settings:
    """Tables of rotary positions, whose parts must add up to half of what a head rotates."""
    found: Settings = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found[name] = _rotary(value, before, after)
        elif role(name) == "positions" and _is_int(value):
            found[name] = min(value, POSITIONS // 2)
        elif name == "mrope_section":
            head = after.get("head_dim") or after["hidden_size"] // after["num_attention_heads"]
            pairs = (
                int(head * table.get("partial_rotary_factor", after.get("partial_rotary_factor", 1.0))) // 2
            )
            found[name] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        else:
            found[name] = value
    return found
