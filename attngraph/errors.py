"""The errors that attngraph raises. Messages say what was tried, what was found and what to do."""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attngraph.reasons import Kind, kind_of


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known name, or the list of known names."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}."


def first_line(problem: BaseException) -> str:
    """The first line of what an exception says, or else its kind."""
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def reason_of(problem: BaseException) -> str:
    """What an exception says; of the system, without its number and the file."""
    return getattr(problem, "strerror", None) or str(problem)


@contextlib.contextmanager
def told_as(
    kind: type[Exception], *caught: type[BaseException], before: str = "", after: str = "",
    words: Callable[[BaseException], str] = reason_of,
) -> Iterator[None]:  # fmt: skip
    """In this block, an exception of the kinds that are caught becomes one of `kind`, with words for it
    between what is said `before` and `after`. One that is of `kind` already stays."""
    try:
        yield
    except kind:
        raise
    except caught as problem:
        raise kind(f"{before}{words(problem)}{after}") from problem


class AttnGraphError(RuntimeError):
    """Base class of attngraph's errors."""

    @property
    def kind(self) -> Kind:
        """The kind of reason that it gives: a stable `code`, and what to `change`."""
        return kind_of(str(self))


class CaptureError(AttnGraphError):
    """A model that torch.export cannot capture.

    Attributes:
        reason, source: why, in torch's words where torch stopped, and the line of the user's code, if known.
        lasting: every other call would fail too.
        dimensions: the dimensions of the tensor arguments, (argument, dimension), that were symbolic, if a
            capture might succeed where they are numbers.
        changes_state: the reason is that forward() changes attributes or variables.
        settings: the attributes that it changed, and to what, if a capture might succeed that takes what they
            are set to as results.
        splits: torch.compile may capture the model in pieces; if not, it runs as it is.
        extents: numbers that are sizes of values, where a dimension became one that had to be symbolic.
    """

    def __init__(
        self, message: str, reason: str, source: str = "", lasting: bool = False,
        dimensions: frozenset[tuple[int, int]] = frozenset(), changes_state: bool = False,
        settings: Mapping[Any, Any] | None = None, extents: Iterable[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.extents = None if extents is None else frozenset(extents)
        self.reason, self.source, self.lasting = reason, source, lasting
        self.dimensions, self.changes_state, self.settings = dimensions, changes_state, settings or {}
        self.splits = True


class NotFusedError(AttnGraphError):
    """Under `strict=True`: something that looks like attention was not fused, for a `reason`."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class VerificationError(AttnGraphError):
    """A program graph violates an invariant of its level: a bug in a pass."""


class PassError(AttnGraphError):
    """A pass failed: a bug in attngraph. `name`: the pass; `file`: the graph before it, if it could be
    written."""

    def __init__(self, message: str, name: str, file: str = "") -> None:
        super().__init__(message)
        self.name, self.file = name, file


class BackendError(AttnGraphError, ValueError):
    """No kernel of the backend that was asked for can compute an attention: says why each cannot."""


class NoDecoderError(AttnGraphError):
    """No decoder can be derived from a model: says which operation prevents it, where, and why."""

    def __init__(
        self, reason: str, fixes_tokens: bool = False, extents: Iterable[int] = (), fixes_rows: bool = False
    ) -> None:
        super().__init__(f"no decoder can be derived from this model: {reason}")
        self.reason = reason
        self.fixes_tokens = fixes_tokens
        """Whether the model was traced for one number of tokens alone."""
        self.fixes_rows = fixes_rows
        """Whether it was traced for one number of sequences alone."""
        self.longer = 0
        """So many tokens a trace must be of, for which all that it divides them by gives more than 1."""
        self.asked = False
        """Whether the model had asked for sizes, so that it may do something else with others."""
        self.extents = frozenset(extents)
        """Numbers in it that are not the number of its tokens, and may not be taken for it."""


class ConversionError(AttnGraphError):
    """A model's heads cannot be converted: says what prevents it, and where."""


class ExportError(AttnGraphError):
    """A model cannot be exported: says what prevents it, and what to do."""


class CheckError(AttnGraphError):
    """A condition on values does not hold, which the model's forward checks or its decoder relies on: says at
    which line."""


class FrozenError(AttnGraphError):
    """A weight that was frozen (`freeze=`) has changed since, or its memory was given up: says which."""


class CacheError(AttnGraphError):
    """A call of a decoder does not fit its state: too many tokens, or rows that do not match."""


class PlacementError(AttnGraphError):
    """Parameters cannot be divided among ranks as a call needs it: says which, and what to do."""


class DisagreementError(AttnGraphError):
    """Ranks that run a model together were called differently: says how, on every rank."""


class DumpError(AttnGraphError):
    """A dump cannot be written or read: says which file, and what is wrong with it."""


class TextError(AttnGraphError):
    """The text of a graph cannot be read: says which line, and what is wrong with it."""


class SavedError(AttnGraphError):
    """A compiled model cannot be saved, or what was saved cannot be used: says which part, and why."""
