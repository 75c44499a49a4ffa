"""The lines of a function as they are written, and the dimensions of the tensors in them.

Each dimension is named by a letter: b batch, h heads, g key heads, r heads per key head, n batch times heads,
q queries, k keys, d width, e value width.
"""

from __future__ import annotations

from workshop.fuzz.grammar import Case


class Body:
    """Lines, constants of the module, inputs; and the dimension letters of q, k, v, scores and weights.

    Names mean the same throughout: `q`, `k`, `v`, `scores`, `p` (the weights), `out`; `b h g t s d` sizes.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.lines: list[str] = []
        self.constants: list[str] = []
        self.inputs: dict[str, str] = {}
        self.q = self.k = self.v = self.scores = self.out = ""
        self._sizes: dict[str, str] = {}

    def add(self, line: str) -> None:
        self.lines.append(line)

    def once(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def constant(self, line: str) -> None:
        if line not in self.constants:
            self.constants.append(line)

    def input(self, name: str, expression: str) -> str:
        """Add a parameter, made by an expression with sizes in braces, and return its name."""
        self.inputs[name] = expression
        return name

    def normal(self, name: str, shape: str) -> str:
        """Add a parameter of normally distributed numbers, such as `normal("bias", "{T}, {S}")`."""
        return self.input(name, f"torch.randn({shape}, generator=g, dtype=torch.float64)")

    def set_scores(self, text: str) -> None:
        self.add(f"scores = {text}")

    def size(self, letter: str) -> str:
        """A variable with the size of that dimension, read from a tensor when first asked for."""
        if letter not in self._sizes:
            name = {"q": "t", "k": "s"}.get(letter, letter)
            holders = {"q": self.q, "k": self.k, "v": self.v, "scores": self.scores}
            holder = next(h for h, letters in holders.items() if letter in letters)
            self.add(f"{name} = {holder}.shape[{holders[holder].index(letter)}]")
            self._sizes[letter] = name
        return self._sizes[letter]

    def need(self, letters: str) -> None:
        """Split the batch and head dimensions of flattened scores if `letters` needs them."""
        if set("bh") & set(letters) and "n" in self.scores:
            view = f".unflatten(0, (-1, {self.case.heads}))"
            self.set_scores(f"scores{view}")
            self.scores = self.scores.replace("n", "bh")

    def per_head(self, name: str, shape: str, rest: str = "") -> str:
        """A parameter with a number, or a tensor of `rest` dimensions, for each head, aligned with the
        scores; one for all heads where the scores have no head dimension."""
        self.need("h")
        have = ("h" if "h" in self.scores or "g" in self.scores else "") + rest
        sizes = (["{H}"] if have.startswith("h") else []) + ([shape] if shape else [])
        self.normal(name, ", ".join(sizes) if sizes else "()")
        return self.over_heads(name, have)

    def over_heads(self, name: str, have: str, want: str = "") -> str:
        """A tensor whose dimension h is split where the scores' heads are, aligned with the scores (or
        with the dimensions in `want`)."""
        if "h" in have and "h" not in self.scores:
            name = f"{name}.unflatten({have.index('h')}, (-1, {self.case.repeats}))"
            have = have.replace("h", "gr")
        return aligned(name, have, want or self.scores)


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
