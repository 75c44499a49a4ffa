"""What a compilation did, for people (`str`) and for machines (`to_json`)."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence

from attngraph.pipeline import PassRecord


@dataclasses.dataclass(frozen=True)
class LatentEntry:
    """How an attention whose keys and values are made from a latent is computed.

    A token's latent has `width` values, its keys and values `expanded`. `absorb` is "auto", "always" or
    "fold", empty where the attention is left as the model has it, for `reason`. With "auto" a call absorbs
    as long as each row brings fewer than `few` new tokens (None: always), seen over many kept ones; counting
    operations alone, fewer than `few_by_flops`. `pair_absorbed` and `pair_expanded` are floating-point
    operations of one query and one key, `up` those of projecting one key and one value. Folded:
    `parameters` before and after, `operations` of one token with them before and after, and why matrices
    stay `apart`, if they do.
    """

    width: int = 0
    expanded: int = 0
    absorb: str = ""
    few: int | None = None
    few_by_flops: float = 0.0
    pair_absorbed: int = 0
    pair_expanded: int = 0
    up: int = 0
    reason: str = ""
    parameters: tuple[int, int] | None = None
    operations: tuple[int, int] | None = None
    apart: str = ""

    def lines(self) -> list[str]:
        """For people: what is kept, how it is computed, what it costs."""
        if self.reason:
            return [f"left expanded: {self.reason}"]
        kept = f"{self.width:,} values per token for {self.expanded:,}"
        if not self.absorb:
            return [f"{kept}, values are a part of the keys"]
        cost = (
            f"operations: {self.pair_absorbed:,} absorbed, {self.pair_expanded:,} expanded for a pair, "
            f"{self.up:,} to expand a token"
        )
        return [f"{kept}, {self._order()}", cost]

    def _order(self) -> str:
        if self.parameters is not None and self.operations is not None:
            (p, q), (a, b) = self.parameters, self.operations
            apart = f" (apart: {self.apart})" if self.apart else ""
            return f"folded: {p:,} -> {q:,} parameters, {a:,} -> {b:,} operations a token{apart}"
        if self.absorb != "auto":
            return f"{self.absorb} absorbed"
        if self.few is None:
            return "always absorbed, by cost"
        return (
            f"expanded from {self.few:,} new tokens of a row on, over many kept ones "
            f"(by operations alone {self.few_by_flops:,.0f})"
        )

    def describe(self) -> str:
        return "; ".join(self.lines())


@dataclasses.dataclass(frozen=True)
class AttentionEntry:
    """One attention of the model.

    `name` is the module that computes it, `program` its score program, `mask` the mask in words,
    `source` the user's line. `heads`, `kv_heads`, `head_dim`, `value_dim` are those of the traced call.
    `kernel` is who computes it, `numerics` how the result relates to the
    eager one, `error` the largest relative error found when it was checked in float64. `merged` is how many
    attentions of the model (one per head, say) it stands for. `latent` is there where keys and values are
    made from a narrower value, or nearly so.
    """

    name: str
    program: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    mask: str
    source: str
    kernel: str
    error: float
    numerics: str = "reassociated"
    merged: int = 1
    latent: LatentEntry | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What makes two attentions equal for a reader: everything but where they stand."""
        skipped = ("name", "error")
        return tuple(v for k, v in vars(self).items() if k not in skipped)


@dataclasses.dataclass(frozen=True)
class Missed:
    """A softmax-like place that was left alone: why, and where."""

    reason: str
    source: str
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Break:
    """Where capture of the whole model stopped, so that torch.compile captures it in pieces."""

    reason: str
    source: str


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """What a derived decoder keeps.

    `bytes_per_token` is of all layers together; `expanded` what keys and values of every query head would
    take; `stores` lists (what, bytes per token, window or None). `fixed` values are computed once for a
    prompt. `most_tokens` is the longest sequence the model takes (None: no limit is known). `error` is the
    largest difference to the whole sequence, in float64, relative to the largest logit (None: not compared).
    """

    bytes_per_token: int
    expanded: int
    attentions: int
    stores: tuple[tuple[str, int, int | None], ...]
    fixed: int = 0
    most_tokens: int | None = None
    error: float | None = None

    def lines(self) -> list[str]:
        layers = f", {self.bytes_per_token / self.attentions:,.0f} per attention" if self.attentions else ""
        found = [
            "",
            f"  cache   {self.bytes_per_token:,} bytes per token{layers}",
            f"      keys and values of every query head would be {self.expanded:,}",
        ]
        for (size, window), group in itertools.groupby(self.stores, key=lambda s: s[1:]):
            members = [s[0] for s in group]
            kept = "all tokens" if window is None else f"the last {window}"
            names = members[0] if len(members) == 1 else f"{members[0]} .. {members[-1]}"
            found.append(f"      {len(members)} value(s) of {size:,} bytes per token, {kept}   {names}")
        if self.fixed:
            found.append(f"      {self.fixed} value(s) computed once for a prompt")
        if self.most_tokens is not None:
            found.append(f"      at most {self.most_tokens:,} tokens in a sequence")
        shown = "not compared with whole sequences" if self.error is None else (
            f"equal to whole sequences in float64 (error {self.error:.0e})")  # fmt: skip
        return [*found, f"      {shown}"]


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What was fused, what was not and why, and what each pass did."""

    attention: tuple[AttentionEntry, ...] = ()
    missed: tuple[Missed, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    breaks: tuple[Break, ...] = ()
    seconds: float = 0.0
    graphs: int = 1
    cache: CacheEntry | None = None

    def to_json(self) -> str:
        """The whole report as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        total = len(self.attention) + len(self.missed)
        lines = [
            f"attngraph: {len(self.attention)} of {total} softmax-like places fused, "
            f"compiled in {self.seconds:.2f} s"
        ]
        if self.graphs == 0:
            lines = ["attngraph: nothing traced yet; call the compiled model once"]
        for entries in _folded(self.attention):
            lines += _attention_lines(entries)
        for missed, group in itertools.groupby(self.missed, key=lambda m: (m.reason, m.source)):
            count = len(list(group))
            times = f" x {count}" if count > 1 else ""
            lines += ["", f"  not fused{times}   {missed[1]}", f"      {missed[0]}"]
        if self.cache is not None:
            lines += self.cache.lines()
        for stop in self.breaks:
            lines += ["", f"  captured in pieces   {stop.source}", f"      {stop.reason}"]
        if self.passes:
            lines.append("")
        for record in self.passes:
            change = f"{record.before} -> {record.after} ops" if record.changed else "no change"
            lines.append(f"  {record.name:<18} {change:<18} {record.seconds * 1000:8.1f} ms")
        return "\n".join(lines)


def _folded(entries: Sequence[AttentionEntry]) -> list[list[AttentionEntry]]:
    groups: dict[tuple[object, ...], list[AttentionEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.kind, []).append(entry)
    return list(groups.values())


def _attention_lines(entries: list[AttentionEntry]) -> list[str]:
    first = entries[0]
    times = f" x {len(entries)}" if len(entries) > 1 else ""
    names = first.name or "attention"
    if len(entries) > 1:
        names = f"{first.name} .. {entries[-1].name}"
    heads = f"{first.heads} heads"
    if first.kv_heads != first.heads:
        heads += f" on {first.kv_heads} key/value heads"
    if first.merged > 1:
        heads += f", merged from {first.merged} attentions,"
    width = f"{first.head_dim}"
    if first.value_dim != first.head_dim:
        width += f" (values {first.value_dim})"
    error = max(e.error for e in entries)
    return [
        "",
        f"  attention{times}   {first.source}   {names}",
        f"      {heads} of width {width}, mask: {first.mask}",
        *(f"      | {line}" for line in first.program.splitlines()),
        *_latent_lines(first.latent),
        f"      kernel {first.kernel or '-'}, {first.numerics}, checked in float64 (error {error:.0e})",
    ]


def _latent_lines(latent: LatentEntry | None) -> list[str]:
    lines = [] if latent is None else latent.lines()
    return [f"      {'latent: ' if place == 0 else '        '}{line}" for place, line in enumerate(lines)]


def merge(reports: Sequence[CompileReport]) -> CompileReport:
    """One report for a model that was captured in pieces."""
    return CompileReport(
        tuple(a for r in reports for a in r.attention),
        tuple(m for r in reports for m in r.missed),
        _merged_passes([p for r in reports for p in r.passes]),
        tuple(dict.fromkeys(b for r in reports for b in r.breaks)),
        sum(r.seconds for r in reports),
        sum(r.graphs for r in reports),
    )


def _merged_passes(records: Sequence[PassRecord]) -> tuple[PassRecord, ...]:
    """One record per pass: the runs of it on several graphs together."""
    found: dict[str, PassRecord] = {}
    for record in records:
        known = found.get(record.name)
        if known is None:
            found[record.name] = record
            continue
        found[record.name] = PassRecord(
            record.name, known.changed or record.changed, known.seconds + record.seconds,
            known.before + record.before, known.after + record.after, known.notes + record.notes,
        )  # fmt: skip
    return tuple(found.values())
