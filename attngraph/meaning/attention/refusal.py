"""Why something that looks like attention is left alone: a value, handed up to the report."""

import dataclasses

from attngraph.meaning.rule import Unliftable, UnliftableBecause


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`sizes` are symbolic sizes that cause it: with numbers in their place it might be recognised."""

    reason: str
    sizes: frozenset[str] = frozenset()


def stands_between(problem: Unliftable) -> str:
    """What keeps an element from being followed, as the reason why the softmax before it is left alone."""
    if isinstance(problem, UnliftableBecause):
        return str(problem)
    return f"between its scores and the sum of its values stands {problem}, which is not looked into"
