"""A plan: the ways to run a model on many ranks, as records, text and numbers, and which one is chosen."""

import dataclasses
import json
from collections.abc import Callable

from attngraph.report.words import alike, seconds, size

OPTIMISER = 2
"""Values that AdamW keeps for each weight, in the weight's dtype."""
_OF_ALL = (
    "bytes are those of the target's own dtypes; the rate of operations is the same for all dtypes",
    "no time is counted for starting collectives, and none is hidden behind computing",
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one rank is, as assumed: operations a second, bytes a second of its memory and of its link in one
    direction, and bytes of memory."""

    flops: float
    bandwidth: float
    link: float
    memory: float


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank of a group does and holds, as derived.

    Attributes:
        weights: bytes of parameters.
        buffers: bytes of the model's other tensors, which every rank has whole.
        cache: bytes that a decoder keeps of a token; None where there is none.
        sequence: bytes that a decoder keeps of a sequence, whatever its length.
        sent, received: bytes for a token, in a forward pass over whole sequences; of the busiest rank.
        sent_new: bytes that a rank of a decoder sends for a new token, and receives; those of the exchange
            over a cache whose tokens are divided too.
        flops: operations for a token, in a forward pass over whole sequences.
        divided: in words, what ranks divide.
        fetched: bytes of the keys and values that a rank fetches for one attention: room for all tokens.
        kept: bytes that a backward pass keeps of a call, fetched keys included; 0 where none is planned.
    """

    weights: int
    buffers: int
    cache: int | None
    sequence: int
    sent: float
    received: float
    sent_new: int
    flops: float
    divided: str
    fetched: int = 0
    kept: int = 0


@dataclasses.dataclass(frozen=True)
class Way:
    """`groups` copies of the model, each of which is run by `ranks` ranks that divide it by `axis`: "tensor",
    "context", "both" (`tokens` of them along the axis of tokens), or "data" where one rank runs all of it.
    `reason`: why nothing is derived, where `share` is None."""

    axis: str
    ranks: int
    groups: int
    share: Share | None
    reason: str = ""
    tokens: int = 1

    @property
    def name(self) -> str:
        if self.axis == "both":
            return f"tensor {self.ranks // self.tokens} x context {self.tokens}"
        return f"{self.axis} {self.groups if self.axis == 'data' else self.ranks}"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a way costs: bytes a rank needs, whether they fit, seconds for a token of whole sequences, seconds
    for a new token of one sequence (None: no decoder), and tokens a second on all ranks together."""

    memory: float
    fits: bool
    token: float
    new_token: float | None
    throughput: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """All ways to run a model on so many ranks.

    Attributes:
        tokens: of the example's longest attention; `call`: those of all sequences of the example.
        remarks: what was not counted, and why.
        training: whether it is one of steps of training, not of answers.
    """

    ranks: int
    tokens: int
    call: int
    machine: Machine
    ways: tuple[Way, ...]
    remarks: tuple[str, ...] = ()
    training: bool = False

    def estimate(self, way: Way) -> Estimate | None:
        """What a way costs, by the formulas that `assumptions` states; None where nothing is derived."""
        share, machine = way.share, self.machine
        if share is None:
            return None
        if self.training:
            return self._of_training(way, share)
        kept = (share.cache or 0) * self.tokens + share.sequence
        memory = share.weights + share.buffers + kept + share.fetched
        sending = max(share.sent, share.received) / machine.link
        computing = share.flops / machine.flops
        token = max(computing, share.weights / self.call / machine.bandwidth) + sending
        new = None
        if share.cache is not None:
            new = max(computing, (share.weights + kept) / machine.bandwidth) + share.sent_new / machine.link
        return Estimate(memory, memory <= machine.memory, token, new, way.groups / token)

    def _of_training(self, way: Way, share: Share) -> Estimate:
        """What a step costs: forward and backward, and gradients added up by ranks with the same weights."""
        machine, copies = self.machine, way.groups * way.tokens
        if way.axis == "context":
            copies = way.groups * way.ranks
        memory = (2 + OPTIMISER) * share.weights + share.buffers + share.kept
        gradients = 2 * share.weights * (copies - 1) / copies / self.call
        sending = (2 * max(share.sent, share.received) + gradients) / machine.link
        moving = 3 * share.weights / self.call / machine.bandwidth
        token = max(3 * share.flops / machine.flops, moving) + sending
        return Estimate(memory, memory <= machine.memory, token, None, way.groups / token)

    @property
    def estimates(self) -> list[tuple[Way, Estimate]]:
        """The ways of which something is derived, and what they cost."""
        return [(way, found) for way in self.ways if (found := self.estimate(way)) is not None]

    @property
    def chosen(self) -> Way | None:
        """The way that fits with the most tokens a second; of equals, the one with the smallest groups."""
        fitting = [(way, cost) for way, cost in self.estimates if cost.fits]
        return max(fitting, key=lambda f: (f[1].throughput, -f[0].ranks))[0] if fitting else None

    @property
    def why(self) -> str:
        """Why that one, in one sentence."""
        chosen = self.chosen
        if chosen is None:
            known = [cost.memory for _, cost in self.estimates]
            least = f"the least that a rank needs is {size(min(known))}" if known else "nothing is derived"
            more = ". Other ways were not derived" if any(w.share is None for w in self.ways) else ""
            return f"none: no way fits into {size(self.machine.memory)}; {least}{more}."
        fitting = sum(cost.fits for _, cost in self.estimates)
        copies = f"{chosen.groups:,} group(s) of {chosen.ranks:,} rank(s), each group with the whole model"
        best = "the only one that fits" if fitting == 1 else f"most tokens a second of {fitting} that fit"
        return f"{chosen.name} ({copies}): {best}."

    def assumptions(self) -> list[str]:
        """The formulas and the numbers of the estimates."""
        m = self.machine
        machine = (
            f"a rank: {m.flops:.3g} operations a second, memory {size(m.memory)} at {size(m.bandwidth)} a "
            f"second, link {size(m.link)} a second in one direction"
        )
        of_training = (
            f"a token of a step with {self.call:,} tokens: max(3 x operations, 3 x weights / tokens of "
            "the call / bandwidth) + (2 x bytes sent or received + gradients) / link; gradients are "
            "added up in a ring by the n ranks with the same weights: 2 x weights x (n - 1) / n / tokens "
            "of the call",
            f"memory: weights, as many bytes of gradients, {OPTIMISER} x as many of AdamW's state (two "
            "moments in the dtype of the weights), buffers, and what torch's autograd keeps of the call. "
            "All parameters are trained, nothing is computed again, and what operations need while they "
            "run is not counted",
        )
        of_answers = (
            "a token: max(operations, weights / tokens of the call / bandwidth) + bytes sent or received / "
            f"link, where a call has {self.call:,} tokens, forward only",
            f"a new token, of one sequence of {self.tokens:,}: max(operations, (weights + cache) / "
            "bandwidth) + bytes sent for it / link",
            f"it fits if weights, buffers, the cache of one sequence of {self.tokens:,} tokens, and the keys "
            "that are fetched for one attention do; other activations are not counted (--training does)",
        )
        return [machine, *(of_training if self.training else of_answers), *_OF_ALL, *self.remarks]

    def to_json(self) -> str:
        """The plan as a JSON object."""
        costs = {way: dataclasses.asdict(cost) for way, cost in self.estimates}
        ways = [
            {**dataclasses.asdict(way), "name": way.name, "estimate": costs.get(way)} for way in self.ways
        ]
        found = {
            "ranks": self.ranks, "tokens": self.tokens, "call": self.call, "training": self.training,
            "machine": dataclasses.asdict(self.machine), "ways": ways,
            "chosen": self.chosen and self.chosen.name, "why": self.why, "assumptions": self.assumptions(),
        }  # fmt: skip
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        columns = [(head, text) for head, training, text in _COLUMNS if training in (None, self.training)]
        rows = [[head for head, _ in columns]]
        for way, cost in self.estimates:
            assert way.share is not None
            rows.append([text(way, way.share, cost) for _, text in columns])
        first, *widths = (max(map(len, texts)) for texts in zip(*rows, strict=True))
        lines = ["  ".join(["", row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in rows]
        divided = {w.share.divided: w for w in reversed(self.ways) if w.share is not None}
        told = [f"  {way.name}: {text}" for text, way in reversed(divided.items()) if text]
        missing = [w for w in self.ways if w.share is None]
        for (axis, reason), members in alike(missing, lambda w: (w.axis, w.reason)):
            counts = ", ".join(w.name if axis == "both" else f"{w.ranks:,}" for w in members)
            told.append(f"  {'' if axis == 'both' else f'{axis} '}{counts}: not derived: {reason}")
        return "\n".join([
            *lines, "", *told, "", f"chosen: {self.why}", "", "assumed:",
            *(f"  {line}" for line in self.assumptions()),
        ])  # fmt: skip


_COLUMNS: tuple[tuple[str, bool | None, Callable[[Way, Share, Estimate], str]], ...] = (
    ("way", None, lambda way, share, cost: way.name),
    ("ranks x groups", None, lambda way, share, cost: f"{way.ranks:,} x {way.groups:,}"),
    ("weights", None, lambda way, share, cost: size(share.weights)),
    ("gradients", True, lambda way, share, cost: size(share.weights)),
    ("optimiser", True, lambda way, share, cost: size(OPTIMISER * share.weights)),
    ("activations", True, lambda way, share, cost: size(share.kept)),
    ("cache/token", False, lambda way, share, cost: _or_none(size, share.cache)),
    ("sent/token", None, lambda way, share, cost: size(share.sent)),
    ("received/token", None, lambda way, share, cost: size(share.received)),
    ("sent/new token", False,
     lambda way, share, cost: _or_none(size, None if share.cache is None else share.sent_new)),
    ("a token", None, lambda way, share, cost: seconds(cost.token)),
    ("a new token", False, lambda way, share, cost: _or_none(seconds, cost.new_token)),
    ("memory", None, lambda way, share, cost: size(cost.memory)),
    ("fits", None, lambda way, share, cost: "yes" if cost.fits else "no"),
)  # fmt: skip
"""Of the table: the head; of which plans, those of training or others (None: of all); what is in it."""


def _or_none(words: Callable[[float], str], number: float | None) -> str:
    return "-" if number is None else words(number)
