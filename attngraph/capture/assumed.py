"""What a trace takes for granted about its call, as one value.

`capture` is given it, and a trace that fails may say what else to take for granted: the next one assumes
`assumed.after(problem)`. One loop is then all that looks for a graph:

    while True:
        try:
            return capture(target, args, kwargs, assumed)
        except CaptureError as problem:
            if (other := assumed.after(problem)) is None:
                raise
            assumed = other

Whoever derives a graph from a call of its own choosing makes the value (`Assumed(tokens=11)`), hands it down
whole, and asks it where a later step depends on it.
"""

from __future__ import annotations

import dataclasses

from attngraph.capture.attributes import Settings
from attngraph.errors import CaptureError

Dimension = tuple[int, int]
"""The number of a tensor among a call's arguments, and one of its dimensions."""


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What a graph may take for granted.

    Attributes:
        fixed: dimensions that are numbers in it. All others are symbolic where torch can follow them.
        symbolic: dimensions that must be symbolic: a graph for one number of them is of no use.
        settings: attributes that each call sets, which are results of the graph, and to what.
        reads: whether a call may read these before it sets them. (Such a graph cannot serve calls.)
        tokens: the number of the tokens, where the graph is for it alone; it is a size of nothing else.
        multiples: of that number, with which operations computed in a trace for another one.
        rows_alone: whether the model is called with one sequence at a time, and the graph is a batch of such
            calls. The call has one tensor.
        one_row: a dimension that is 1 in every call of the graph, though it is a symbol in it: questions
            about it are answered so. (Whether the model does that with one, whoever asks has to show.)
    """

    fixed: frozenset[Dimension] = frozenset()
    symbolic: frozenset[Dimension] = frozenset()
    settings: Settings = dataclasses.field(default_factory=dict)
    reads: bool = False
    tokens: int = 0
    multiples: frozenset[int] = frozenset()
    rows_alone: bool = False
    one_row: Dimension | None = None

    def with_numbers(self, dimensions: frozenset[Dimension]) -> Assumed:
        """The same with numbers for these dimensions too."""
        return dataclasses.replace(self, fixed=self.fixed | dimensions)

    def after(self, problem: CaptureError) -> Assumed | None:
        """What the next trace takes for granted, if this one failed so: attributes that are set become
        results, then sizes that torch cannot follow numbers. None: nothing else would help."""
        if problem.settings and not self.settings:
            return dataclasses.replace(self, settings=problem.settings)
        return self.with_numbers(problem.dimensions) if problem.dimensions - self.fixed else None


NOTHING = Assumed()
"""What a trace takes for granted unless told: nothing."""
