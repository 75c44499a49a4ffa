"""Expressions that bring a tensor's dimensions into a wanted order, each dimension named by a letter.

b batch, h heads, g key heads, r heads per key head, n batch times heads, q queries, k keys, d width, e value
width. Only text is made here.
"""

from __future__ import annotations


def transposed(name: str, style: str, rank: int) -> str:
    """The last two dimensions of a tensor of that rank exchanged, in one of the ways to write it."""
    order = [*range(rank - 2), rank - 1, rank - 2]
    return {
        "mT": f"{name}.mT",
        "transpose": f"{name}.transpose(-2, -1)",
        "swapaxes": f"{name}.swapaxes({rank - 1}, {rank - 2})",
        "permute": f"{name}.permute({', '.join(map(str, order))})",
    }[style]


def aligned(name: str, have: str, want: str, style: str = "mT") -> str:
    """`name`, of dimensions `have`, with its dimensions in the order of `want`, and dimensions of size 1
    for the others, so that it broadcasts to `want`. All of `have` must be in `want`."""
    assert set(have) <= set(want), (name, have, want)
    order = [have.index(letter) for letter in want if letter in have]
    if order != sorted(order):
        if order == [*range(len(have) - 2), len(have) - 1, len(have) - 2]:
            name = transposed(name, style, len(have))
        else:
            name = f"{name}.permute({', '.join(map(str, order))})"
    picks = [":" if letter in have else "None" for letter in want]
    while picks and picks[0] == "None":
        picks.pop(0)
    while picks and picks[-1] == ":":
        picks.pop()
    return f"{name}[{', '.join(picks)}]" if picks else name


def dimension(letters: str, letter: str) -> int:
    """The dimension of that letter, counted from the end."""
    return letters.index(letter) - len(letters)
