"""A rewrite that is tried: built, checked in float64, and kept or undone.

    with Proposal(graph, node, checks) as proposal:
        new = proposal.trace(lambda x, w: x @ w, x, w)
        proposal.replace(node, new, [x, w])
    if proposal.problem:
        notes.append(f"left as it is: {proposal.problem}")

The block builds nodes before `node`. `replace` finds at once whether the new value is the old one (it raises
`Refused` if not), and values are replaced when the block ends. Where that is by a refusal, all that it did is
undone, and `problem` is the reason.
"""

import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from attngraph.ir.graph import ProgramGraph, keep_sizes, source_of
from attngraph.ir.language.score import ProgramError
from attngraph.meaning.attention.claim import NO_VIEW
from attngraph.meaning.attention.layout import NoView
from attngraph.meaning.check.check import Checks, Verdict
from attngraph.meaning.rule import Unliftable
from attngraph.passes.build import Builder, Refused

log = logging.getLogger(__name__)
REFUSALS = (Refused, NoView, ProgramError, Unliftable)


class Proposal(Builder):
    """Builds before `anchor`, until the block ends.

    Args:
        checks: verdicts so far, so that equal claims are checked once.
        survives: an error of our own leaves the graph as it was too, and is the problem; else it is raised.

    Attributes:
        done: whether the block ended without a refusal, and something was replaced.
        problem: why nothing was done; "" where nothing was refused. `tell`: whether a user would ask.
    """

    def __init__(
        self, graph: ProgramGraph, anchor: fx.Node, checks: Checks | None = None, survives: bool = False
    ) -> None:
        super().__init__(graph, anchor)
        self.checks, self.survives = checks or Checks(graph), survives
        self.done, self.problem, self.tell = False, "", True
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._undo: list[Callable[[], None]] = []
        self._outer: Proposal | None = None

    def check(self, old: fx.Node, new: fx.Node, leaves: Iterable[fx.Node], about: str = "") -> Verdict:
        """The verdict that both are the same function of `leaves`.

        Raises:
            Refused: they are not; says what differs, after `about`.
        """
        verdict = self.checks.same_value(old, new, leaves)
        if verdict.problem:
            raise Refused(about + verdict.problem)
        return verdict

    def replace(self, old: fx.Node, new: fx.Node, leaves: Iterable[fx.Node] | None = None) -> None:
        """Put `new` in the place of `old` when the block ends. `leaves`: check that both are the same
        function of these; without them it is the caller who knows.

        Raises:
            Refused: they are not.
        """
        if leaves is not None:
            self.check(old, new, leaves)
        self._replaced[old] = new

    def at(self, anchor: fx.Node) -> Builder:
        """A builder before another node. What it builds is this proposal's."""
        other = Builder(self.graph, anchor)
        other.made = self.made
        return other

    def attempt(self) -> "Proposal":
        """A proposal within this one: what it builds is built by this one where it is not refused."""
        made = Proposal(self.graph, self.anchor, self.checks)
        made._outer = self
        return made

    def undo_by(self, restore: Callable[[], None]) -> None:
        """Call this where the block is refused, before the nodes are removed that it made."""
        self._undo.append(restore)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if problem is None:
            for old, new in self._replaced.items():
                keep_sizes(old, new)
                old.replace_all_uses_with(new)
                self.graph.graph.erase_node(old)
            self.done = bool(self._replaced)
            if self._outer is not None:
                self._outer.made += self.made
                self._outer._undo += self._undo
            return True
        for restore in reversed(self._undo):
            restore()
        self.discard()
        if isinstance(problem, REFUSALS):
            self.problem, self.tell = str(problem) or NO_VIEW, getattr(problem, "tell", True)
            return True
        if not self.survives or not isinstance(problem, Exception):
            return False
        if isinstance(problem, GuardOnDataDependentSymNode):
            self.problem = "a size that only data tell decides how it would be computed"
            return True
        log.exception("could not rewrite %s at %s", self.anchor, source_of(self.anchor))
        self.problem = f"an error of the compiler, please report it: {type(problem).__name__}: {problem}"
        return True
