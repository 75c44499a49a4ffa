"""Several continuations of a row at once, as a tree: each new token sees its ancestors alone.

Every path from the root to a leaf is a row of the state for as long as nobody has said which one stays. So a
token's position is its depth, and whatever a model keeps of its tokens, sums and windows too, is that of its
own path; rows share the pages of what they begin with. A token above several leaves is computed for each.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.errors import CacheError


@dataclasses.dataclass(frozen=True)
class Tree:
    """The paths that the rows of a state are.

    Attributes:
        sources: of which row before each is a path. paths: its tokens, by their places among the new ones.
        before: the tokens of each row before.
    """

    sources: list[int]
    paths: list[list[int]]
    before: list[int]

    @classmethod
    def of(cls, parents: Sequence[Sequence[int]], before: Sequence[int]) -> "Tree":
        """`parents`: for each new token of each row the place of the one that it follows, or -1 for none.

        Raises:
            ValueError: a parent does not come before its child.
        """
        sources, paths = list[int](), list[list[int]]()
        for row, above in enumerate(parents):
            if any(not -1 <= parent < place for place, parent in enumerate(above)):
                raise ValueError(
                    f"row {row}: a parent is an earlier token of the row, or -1; found {list(above)}."
                )
            path_to: list[list[int]] = []
            for place, parent in enumerate(above):
                path_to.append([*(path_to[parent] if parent >= 0 else []), place])
            leaves = [place for place in range(len(above)) if place not in above]
            sources += [row] * len(leaves)
            paths += [path_to[leaf] for leaf in leaves]
        return cls(sources, paths, list(before))

    def firsts(self) -> list[int]:
        """The first path of each row before."""
        return [self.sources.index(row) for row in range(len(self.before))]

    def tokens(self, ids: Tensor) -> list[Tensor]:
        """Those of each path, of new tokens `[B, S]`."""
        return [ids[row, path] for row, path in zip(self.sources, self.paths, strict=True)]

    def gathered(self, logits: Tensor, shape: Sequence[int]) -> Tensor:
        """The logits of each new token, `[B, S, V]`, of those of the paths, `[P, T, V]`."""
        found = logits.new_empty((*shape, logits.shape[-1]))
        for number, (row, path) in enumerate(zip(self.sources, self.paths, strict=True)):
            found[row, path] = logits[number, : len(path)]
        return found

    def picked(self, paths: Any) -> tuple[list[int], list[int]]:
        """For each row before, which path begins with its own of these, and how many tokens it then has."""
        flat = len(self.before) == 1 and not (len(paths) and isinstance(paths[0], Sequence | Tensor))
        wanted = [[int(n) for n in own] for own in ([paths] if flat else paths)]
        if len(wanted) != len(self.before):
            raise CacheError(f"{len(wanted)} path(s) for {len(self.before)} row(s).")
        picked = list[int]()
        for row, own in enumerate(wanted):
            paths_of = (n for n, source in enumerate(self.sources) if source == row)
            found = next((n for n in paths_of if self.paths[n][: len(own)] == own), None)
            if found is None:
                raise CacheError(f"row {row}: {own} is no path from the row's last token on.")
            picked.append(found)
        return picked, [before + len(own) for before, own in zip(self.before, wanted, strict=True)]


def rows_of(
    parents: Tensor | Sequence[int] | Sequence[Sequence[int]], shape: tuple[int, int]
) -> list[list[int]]:
    """Parents as given, `[B, S]` or `[S]` for all rows, as a list for each row."""
    given = torch.as_tensor(parents)
    if given.shape not in (shape[1:], shape):
        raise ValueError(
            f"parents are [S] or [B, S] as the tokens, {list(shape)}; found {list(given.shape)}."
        )
    return given.expand(shape).tolist()  # type: ignore[no-any-return]
