"""The errors that attngraph raises, each saying what was tried, what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: what may be meant, or what there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}."


class AttnGraphError(RuntimeError):
    """Base of every error of attngraph's own."""


class CaptureError(AttnGraphError):
    """A model that torch.export cannot capture. `reason` is torch's; `source` the user's line, if known;
    `lasting`: no other call will fare better."""

    def __init__(self, message: str, reason: str, source: str = "", lasting: bool = False) -> None:
        super().__init__(message)
        self.reason, self.source, self.lasting = reason, source, lasting


class NotFusedError(AttnGraphError):
    """Under `strict=True`: something that looks like attention was left alone."""


class VerificationError(AttnGraphError):
    """A program graph breaks a rule of its level: a bug in a pass."""


class PassError(AttnGraphError):
    """A pass that failed: a bug of ours. `name` is the pass, `file` the graph before it, if it could be
    written."""

    def __init__(self, message: str, name: str, file: str = "") -> None:
        super().__init__(message)
        self.name, self.file = name, file


class NoDecoderError(AttnGraphError):
    """No decoder can be derived from a model: says which operation is in the way, where, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no decoder can be derived from this model: {reason}")
        self.reason = reason


class ConversionError(AttnGraphError):
    """A model's heads cannot be converted: says what is in the way, and where."""


class CacheError(AttnGraphError):
    """A call of a decoder that its state cannot serve: too many tokens, rows that do not match."""


class DumpError(AttnGraphError):
    """A dump that cannot be written, or read: says which file, and what is wrong with it."""


class TextError(AttnGraphError):
    """The text of a graph that cannot be read: says which line, and what is wrong with it."""
