"""The programs that every kernel is held to: a score program, the tensors that it reads, and the shape of the
call where it is not the kernel's usual one.

A kernel's usual call is `[B, Hq, N, D]` against `[B, Hkv, N, D]`, where N spans several of its blocks and is
no multiple of them. Texts, sizes and shapes may name the numbers of `numbers`, which follow N: `{half}`.
A tensor that is read is written as its extents (`"h,q,k"`; `d` is the number of distances; digits stand for
themselves; nothing for a tensor of rank 0), and then, if it holds no numbers of the kernel's own accuracy,
`<9` for integers below 9 or `:float16` for another dtype. Others have a name in `NAMED`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import Kernel, Operands, accumulation_dtype


@dataclasses.dataclass(frozen=True)
class Shape:
    B: int
    Hq: int
    Hkv: int
    N: int
    D: int
    Dv: int
    Sq: int = -1
    Skv: int = -1

    def __post_init__(self) -> None:
        for name in ("Sq", "Skv"):
            if getattr(self, name) < 0:
                object.__setattr__(self, name, self.N)

    @property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """Those of q, k and v."""
        keys = (self.B, self.Hkv, self.Skv)
        return (self.B, self.Hq, self.Sq, self.D), (*keys, self.D), (*keys, self.Dv)


def numbers(shape: Shape) -> dict[str, int]:
    n = shape.N
    found = {"N": n, "half": n // 2, "near": n // 2 - 4, "late": n // 8, "far": 5 * n // 8}
    return {**found, "last": shape.Sq - 1, "more": shape.Skv - shape.Sq}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    text: str
    reads: tuple[str, ...]
    sizes: tuple[str | int, ...]
    shape: dict[str, int | str]

    def in_shape(self, usual: Shape) -> Shape:
        known = numbers(usual)
        changed = {name: known[x] if isinstance(x, str) else x for name, x in self.shape.items()}
        return dataclasses.replace(usual, **changed)

    def of(self, usual: Shape, dtype: torch.dtype, device: str = "cpu") -> Call:
        """The call of this case, for a kernel's usual shape."""
        torch.manual_seed(3)
        shape = self.in_shape(usual)
        known = numbers(shape)
        q, k, v = (torch.randn(extents).to(device, dtype) for extents in shape.operands)
        reads = [drawn(read, shape, accumulation_dtype(dtype)).to(device) for read in self.reads]
        sizes = [known[x] if isinstance(x, str) else x for x in self.sizes]
        return Call(self.text.format(**known), (q, k, v), reads, sizes)

    def refusal(self, kernel: Kernel, usual: Shape, dtype: torch.dtype) -> str | None:
        """Why a kernel does not serve such a call on the CPU, or None."""
        shape = self.in_shape(usual)
        q, k, v = (torch.empty(extents, dtype=dtype) for extents in shape.operands)
        return kernel.refuse(parse(self.text.format(**numbers(shape))), (q, k, v))


@dataclasses.dataclass(frozen=True)
class Call:
    text: str
    operands: Operands
    reads: list[Tensor]
    sizes: list[int]

    @property
    def is_empty(self) -> bool:
        return any(t.numel() == 0 for t in self.operands)


def padding(shape: Shape) -> Tensor:
    lengths = torch.tensor([3 * shape.Skv // 4, shape.Skv // 2])
    return torch.arange(shape.Skv) < lengths[:, None]


def empty(shape: Shape) -> Tensor:
    """Nothing but some keys in the middle of the first sequence."""
    keys = torch.arange(shape.Skv)
    some = (keys >= shape.Skv // 2) & (keys < 2 * shape.Skv // 3)
    return torch.stack([some, torch.zeros_like(some)])


def documents(shape: Shape) -> Tensor:
    places = torch.arange(max(shape.Sq, shape.Skv))
    return torch.stack([places * 4 // shape.N, places * 3 // shape.N])


NAMED: dict[str, Callable[[Shape], Tensor]] = {
    "padding": padding,
    "empty": empty,
    "documents": documents,
    "documents of 32 bits": lambda shape: documents(shape).int(),
    "lengths": lambda shape: torch.tensor([shape.Skv, 7]),
    "lengths of 32 bits": lambda shape: torch.tensor([shape.Skv // 3, shape.Skv]).int(),
    "a length of nothing": lambda shape: torch.tensor([0, 7]),
    "seed": lambda shape: torch.tensor(2**32 - 5),
    "long seed": lambda shape: torch.tensor(1 << 40 | 9),
    "future": lambda shape: torch.full((shape.Sq, shape.Skv), -torch.inf).triu(1),
    "turned": lambda shape: torch.randn(shape.Skv, 2 * shape.Sq).t()[::2],
    "expanded": lambda shape: torch.randn(shape.B, 1, 1, shape.Skv).expand(-1, shape.Hq, shape.Sq, -1),
}


def drawn(read: str, shape: Shape, dtype: torch.dtype) -> Tensor:
    if read in NAMED:
        return NAMED[read](shape)
    extents = {"b": shape.B, "h": shape.Hq, "q": shape.Sq, "k": shape.Skv, "d": shape.Sq + shape.Skv - 1}
    letters, _, below = read.partition("<")
    letters, _, other = letters.partition(":")
    size = [extents[x] if x in extents else int(x) for x in letters.split(",") if x]
    if below:
        return torch.randint(0, int(below), size)
    return torch.randn(size).to(getattr(torch, other) if other else dtype)


CASES: dict[str, Case] = {}
LOWEST = "-3.4028234663852886e+38"


def case(name: str, text: str, *reads: str, sizes: tuple[str | int, ...] = (), **shape: int | str) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, text, reads, sizes, shape)


# --- the scale, and shapes ---

case("plain", "")
case("scaled", "s = 0.25 * dot")
case("scaled by division", "s = dot / 3")
case("scaled by less than zero", "s = -0.5 * dot")
case("scaled by zero", "s = 0 * dot")
case("causal", "s = 0.25 * dot; keep k <= q")
case("causal, unscaled", "keep k <= q")
case("causal by division", "s = dot / 3; keep k <= q + {late}")
case("causal, few queries", "keep k <= q", Sq=3)
case("causal, many queries", "keep k <= q", Skv=3)
case("across", "s = 0.25 * dot", Sq=5)
case("aligned at the end", "keep k <= q + n0", sizes=("more",), Sq="half")
case("equal heads", "keep k <= q", Hq=2, Hkv=2)
case("one key head", "s = 0.25 * dot", Hkv=1)
case("three heads for each", "keep k <= q", Hq=6, Hkv=2)
case("wide values", "keep k <= q", D=20, Dv=37)
case("narrow values", "keep k <= q", D=20, Dv=1)
case("width 1", "keep k <= q", D=1, Dv=1)
case("width 64", "s = 0.125 * dot; keep k <= q", D=64, Dv=64)
case("width 128, values 70", "s = 0.08 * dot; keep k <= q", D=128, Dv=70)
case("one query", "keep k <= q + n0", sizes=("more",), Sq=1)
case("one key", "keep k <= q", Skv=1)
case("one of each", "", B=1, Hq=1, Hkv=1, Sq=1, Skv=1)
case("whole blocks", "keep k <= q", Sq=96, Skv=128)
case("a token more than whole blocks", "keep k <= q", Sq=97, Skv=129)
case("no keys", "s = 0.25 * dot", Skv=0)
case("no keys but a sink", "sink 1", Skv=0)
case("no queries", "keep k <= q", Sq=0)
case("no batch", "keep k <= q", B=0)
case("no width", "keep k <= q", D=0)

# --- masks ---

case("strictly causal", "keep k < q")
case("hidden by a product", "keep k % 3 == 0 or k == q")
case("several masks of positions", "keep (k - q) % 3 != 1; keep (k - q) // 5 > -4")
case("negated", "keep not (k > q and q > 4)")
case("of sizes", "keep k <= q - n0 and k < n1", sizes=(1, "far"))
case("window", "keep k <= q and k > q - 8")
case("window of n0", "keep k <= q and q - k < n0", sizes=("half",))
case("window on both sides", "keep abs(q - k) <= {late}")
case("window, wider behind", "keep q - k < 7 and k - q < 5")
case("the first keys hidden", "keep k <= q and k >= {late}")
case("window and the first keys", "keep k <= q and (q - k < {late} or k < 4)")
case("chunks", "keep q // 16 == k // 16")
case("chunks of n0", "keep q // n0 == k // n0", sizes=(16,))
case("dilated", "keep (q - k) % 4 == 0 and k <= q")
case("fractions", "keep q % 63 * 0.5 % 1 <= 0 or k == 0")
case("heads with masks of their own", "keep k <= q and q - k < 16 * (h + 1)")
case("a number as predicate", "keep k - {half}")
case("prefix", "keep k <= q or k < r0[b]", "lengths")
case("padding", "keep r0[b, k]", "padding")
case("padding and causal", "keep k <= q; keep r0[b, k] else -1e9", "padding")
case("several masks", "keep k <= q; keep r0[b, k]; keep q - k < {half}", "padding")
case("an empty sequence", "keep r0[b, k]", "empty")
case("an empty sequence, filled", "keep r0[b, k] else -1e9", "empty")
case("an empty sequence, weights replaced", "keep r0[b, k]; p = where(isnan(p), 0, p)", "empty")
case("lengths", "keep k < r0[b]", "lengths")
case("lengths of 32 bits", "keep k < r0[b]", "lengths of 32 bits")
case("a length of nothing", "keep k < r0[b]", "a length of nothing")
case("documents", "keep k <= q and r0[b, q] == r0[b, k]", "documents")
case("documents of 32 bits", "keep r0[b, q] == r0[b, k]", "documents of 32 bits")
case("a mask of float64", "keep r0[b, k] > 0", "b,k:float64")
case("rows without keys", "keep k < q - {late}")
case("blocks without keys", "keep k < q - {half}")
case("rows without keys, weights replaced", "keep k < q - {late}; p = where(isnan(p), 0, p)")
case("rows without keys, mean instead", "keep k < q; p = where(isnan(p), 1 / {N}, p)")
case("rows without keys, weights masked", "keep k < q; p = where(k < {half}, p, 0)")
case("nothing kept", "keep k > 100000")

# --- fills ---

case("fill of -1e9", "s = 0.5 * dot; keep k < q - {late} else -1e9")
case("fill of finfo.min", f"s = 0.5 * dot; keep k < q - {{late}} else {LOWEST}")
case("added finfo.min", f"s = 0.5 * dot; keep k < q - {{late}} else s - {LOWEST[1:]}")
case("fill that leaks", "s = 0.5 * dot; keep k <= q else -5")
case("fill above the scores", "keep k <= q else 5")
case("fill relative to the score", "keep k <= q else s - 5")
case("fill far below the score", "keep k <= q else s - 10000")
case("fill of a larger multiple", "s = 0.2 * dot; keep k <= q else 2 * s - 3; s = 1.5 * s")
case("fill of the negated score", "keep k < {half} else -1e9; keep k < {near} else -1e9 - s")
case("fill where every row is filled", "keep k < 0 else -1e9")
case("fill where some rows are filled", "keep r0[b, q] else -1e9", "padding")
case("fill before a hard mask", "keep k <= q else -1e9; keep k > q - {far}")
case("hard mask, then a fill that uncovers", "keep k < {half}; keep k < {near} else -5")
case("hard mask, then a fill where undecided", "keep k < {half}; keep r0[b, k] else -5", "padding")
case("hard mask, then a fill of the score", "keep k < {half}; keep k < {near} else max(s, -5)")
case("hard mask, then a score", "keep k <= q; s = max(s, -5)")
case("hard mask, then a positive score", "keep k <= q; s = s * s * 0 + dot")
case("padding, then a fill", "keep r0[b, k]; keep k <= q else -10000", "empty")
case("padding filled with finfo.min", f"keep r0[b, k] else {LOWEST}", "empty")
case("padding added", "s = s + where(r0[b, k], 0.0, -10000.0)", "empty")
case("added infinities", "s = s + r0[q, k]", "future")

# --- functions of the score, biases ---

case("softcap", "s = 5 * tanh(dot / 5); keep k <= q")
case("softcap of what is scaled", "s = 0.1 * dot; s = 2 * tanh(s / 2); keep k <= q")
case("score over score", "s = dot ** 2 / 9 + exp(s / 9); keep k <= q")
case("functions", "s = sin(dot) + log(1.5 + cos(s)) + erf(s / 2) + sigmoid(dot) * abs(dot)")
case("no dot at all", "s = 3")
case("only what is read", "s = r0[k, q]", "k,q")
case("slopes", "s = 0.3 * dot + r0[h] * (k - q); keep k <= q", "h")
case("slopes of the head's number", "s = dot - 2 ** (-h - 1) * abs(k - q)")
case("scales", "s = dot * r0[h]; keep k <= q", "h")
case("one number", "s = 0.3 * dot * r0[]; s = s + r0[]", "")
case("sizes in numbers", "s = dot / sqrt(n0) + n1 / 7 - n0 // n1", sizes=(20, 3))
case("bias", "s = 0.3 * dot + r0[b, h, q, k]", "b,h,q,k")
case("bias of float16", "s = dot + r0[h, q, k]", "h,q,k:float16")
case("bias of bfloat16", "s = dot + r0[h, q, k]", "h,q,k:bfloat16")
case("bias, turned", "s = dot + r0[q, k]", "turned")
case("bias, expanded", "s = dot + r0[b, h, q, k]", "expanded")
case("bias of all batches", "s = 0.3 * dot + r0[h, q, k]; keep k <= q + 3", "h,q,k")
case("bias of keys", "s = 0.3 * dot + r0[b, k]; keep q - k < 9", "b,k")
case("biases of heads", "s = 0.3 * dot + r0[h, k] + r1[q, h]", "h,k", "q,h")
case("biases that are multiplied", "s = 0.3 * dot + r0[b, q, k] * r1[q, k]", "b,q,k", "q,k")
case("by distance", "s = 0.3 * dot + r0[h, k - q + n0]; keep k <= q", "h,d", sizes=("last",))
case("by distance, heads last", "s = 0.3 * dot + r0[k - q + n0, h]", "d,h", sizes=("last",))
case("by a distance in range", "s = 0.3 * dot + r0[b, min(abs(k - q), 12)]", "b,13")
case("by a distance's bucket", "s = 0.3 * dot + r0[r1[k - q + n0], h]", "9,h", "d<9", sizes=("last",))
case("by a bucket of the pair", "s = 0.3 * dot + r0[h, r1[q, k]]", "h,7", "q,k<7")
case("by a kind of key", "s = 0.3 * dot + r0[r1[b, k], q]", "5,q", "b,k<5")
case("by blocks", "s = 0.3 * dot + r0[h, q // 64, k % 4]", "h,16,4")
case("several statements", "s = r0[b, q] * 2 + max(dot, r1[k]); s = 0.1 * s + dot * r1[k] ** 2; keep k <= q",
     "b,q", "k")  # fmt: skip
case("functions of what is read",
     "s = dot * rsqrt(1 + r0[k] ** 2) + min(r0[k], r1[q]) * (abs(r1[q]) + 0.5) ** r0[k] / 9"
    " + (2 * r0[k] + 50) % 40 / 9", "k", "q")  # fmt: skip
case("hidden by what is read", "keep r0[b, k] > 0; s = 0.5 * s", "b,k")
case("fill that is read", "s = 4 * tanh((dot + r0[h, k]) / 4); keep k <= q else r1[h] - 3", "h,k", "h")
case("nothing kept of what is read", "keep k > 100000; s = s + r0[h]", "h")
case("read at places that scores say", "s = dot + r0[int(min(abs(dot), 5)), q]", "9,q")

# --- sinks, weights, numbers at the edges ---

case("sink", "keep k <= q; sink r0[h]", "h")
case("sink of a formula", "s = dot / 3; sink 1 - r0[h]", "h")
case("sink of each row", "s = dot * r1[]; keep k < q - {late}; sink r0[b, q] + r1[]", "b,q", "")
case("sink of one head", "keep k < q; sink where(h == 0, -inf, 0.5)")
case("sink that dominates", "keep k <= q else -50; sink 1000")
case("sink and nothing kept", "keep false; sink 1")
case("sink of minus infinity", "keep k < q; sink -inf")
case("sink of infinity", "keep k < q; sink inf")
case("sink of NaN", "sink nan")
case("dropout", "p = where(0.1 <= random(r0[], b, h, q, k), p / 0.9, 0)", "seed")
case("causal dropout", "keep k <= q; p = where(0.1 <= random(5, b, h, q, k), p / 0.9, 0)")
case(
    "dropout by a long seed",
    "keep k <= q; p = where(random(r0[], b, h, q, k) < 0.3, 0, p / 0.7)",
    "long seed",
)
case("weights halved", "s = 0.2 * dot; p = 0.5 * p")
case("weights moved", "keep k <= q; p = p + 0.01")
case("weights squared", "keep k <= q; p = p * p")
case("weights masked", "p = where(k <= q, 2 * p, 0)")
case("weights above a threshold", "p = where(p > 0.01, p, 0)")
case("weights signed by the dot", "s = abs(0.5 * dot); keep k <= q; p = p * sign(dot)")
case("weights and a sink", "sink 1; p = 2 * p; p = where(random(1, b, h, q, k) < 0.5, p, 0)")
case("weights without NaN", "keep k < q; p = where(not isnan(p), 2 * p - p / 4, 0.0)")
case("gates of heads", "keep k <= q - {late}; p = p * r0[h]", "h")
case("gates of keys", "keep k <= q - {late}; p = p * sigmoid(r0[b, k])", "b,k")
case("gates of pairs", "keep k <= q; p = p * r0[q, k]", "q,k")
case("gates where NaN was replaced", "keep k < q - {late}; p = where(isnan(p), 0, p); p = p * r0[h]", "h")
case("scores of infinity", "s = where(k == q, inf, dot)")
case("scores of NaN", "s = where(k == q and q > {far}, nan, dot)")
case("scores of minus infinity", "s = where(k <= q, -inf, dot)")
case("large scores", "s = 300 * dot; keep k <= q")
case("far below zero", "s = dot - 1e30")
case("unequal scores", "s = dot - 3 * k")


CORE = frozenset({
    "causal", "scaled by division", "aligned at the end", "one query", "one of each", "width 128, values 70",
    "documents", "an empty sequence, filled", "rows without keys", "rows without keys, weights replaced",
    "fill of finfo.min", "added finfo.min", "fill that leaks", "fill of a larger multiple", "softcap",
    "functions", "by distance", "by a distance's bucket", "biases of heads", "bias of all batches",
    "several statements", "fill that is read", "sink", "sink of each row", "causal dropout", "gates of pairs",
    "weights halved", "scores of NaN", "far below zero",
})  # fmt: skip
"""The programs of every run where a kernel takes long; the others are run with the slow tests."""

IN_OTHER_DTYPES = {
    "forward": (
        "causal", "scaled", "three heads for each", "softcap", "slopes", "window", "sink", "dropout",
        "fill of -1e9", "rows without keys", "documents", "wide values",
    ),
    "backward": ("causal", "padding", "softcap", "rows without keys", "dropout", "bias of all batches"),
}  # fmt: skip
"""The programs that are run in a kernel's other dtypes too; where it takes long, the first in every run."""
assert CORE.union(*IN_OTHER_DTYPES.values()) <= CASES.keys()
