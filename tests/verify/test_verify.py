"""`attngraph.verify`: ports that are right are equal, and each fault of a list is noticed and told."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.api.verify.programs import by_meaning

WIDTH, HEADS, GROUPS = 32, 4, 2


class Block(nn.Module):
    """A block of a decoder, whose parts can be replaced by others."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = {
            "scale": (WIDTH // HEADS) ** -0.5, "seen": lambda q, k: (k <= q) & (k > q - 6), "cap": None,
            "share": lambda t: t.repeat_interleave(HEADS // GROUPS, 1), "base": 100.0, "half": True,
            "slopes": None, "eps": 1e-5, "activation": F.gelu, "sink": None, "soft": torch.float32, **parts,
        }  # fmt: skip
        self.ids = nn.Embedding(50, WIDTH)
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, n * WIDTH // HEADS) for n in (HEADS, GROUPS, GROUPS, HEADS)
        )
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm.eps = self.parts["eps"]

    def turned(self, x: Tensor) -> Tensor:
        n, d = x.shape[-2:]
        angle = torch.arange(n)[:, None] * self.parts["base"] ** (-torch.arange(0, d, 2) / d)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1) if self.parts["half"] else (x[..., ::2], x[..., 1::2])
        pair = (a * cos - b * sin, a * sin + b * cos)
        return torch.cat(pair, -1) if self.parts["half"] else torch.stack(pair, -1).flatten(-2)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = self.parts["share"](self.turned(k)), self.parts["share"](v)
        s = self.turned(q) @ k.mT * self.parts["scale"]
        if self.parts["cap"]:
            s = self.parts["cap"](s)
        places = torch.arange(x.shape[1])
        if self.parts["slopes"] is not None:
            s = s + self.parts["slopes"].to(s.dtype)[:, None, None] * (places - places[:, None])
        s = s.masked_fill(~self.parts["seen"](places[:, None], places), -torch.inf)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ids(ids)
        x = x + self.attend(x)
        return x + self.down(self.parts["activation"](self.up(self.norm(x))))


def ids(tokens: int = 9) -> tuple[Tensor, ...]:
    return (torch.randint(0, 50, (2, tokens)),)


def slopes(first: float) -> Tensor:
    return first ** torch.arange(1.0, HEADS + 1)


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale of the model's width": ({}, {"scale": WIDTH**-0.5}),
    "scale twice": ({}, {"scale": 1 / (WIDTH // HEADS)}),
    "window longer by one": ({}, {"seen": lambda q, k: (k <= q) & (k >= q - 6)}),
    "window dropped": ({}, {"seen": lambda q, k: k <= q}),
    "sees one later token": ({}, {"seen": lambda q, k: (k <= q + 1) & (k > q - 6)}),
    "first token hidden": ({}, {"seen": lambda q, k: (k <= q) & (k > q - 6) & ((k > 0) | (q == 0))}),
    "groups repeated instead of interleaved": ({}, {"share": lambda t: t.repeat(1, HEADS // GROUPS, 1, 1)}),
    "another base": ({}, {"base": 99.0}),
    "pairs interleaved": ({}, {"half": False}),
    "epsilon": ({}, {"eps": 1e-6}),
    "gelu by tanh": ({}, {"activation": lambda x: F.gelu(x, approximate="tanh")}),
    "relu": ({}, {"activation": F.relu}),
    "softcap dropped": ({"cap": lambda s: 2 * torch.tanh(s / 2)}, {}),
    "softcap of another size": (
        {"cap": lambda s: 2 * torch.tanh(s / 2)}, {"cap": lambda s: 2.001 * torch.tanh(s / 2.001)},
    ),
    "slopes": ({"slopes": slopes(0.5)}, {"slopes": slopes(0.505)}),
    "no slopes": ({"slopes": slopes(0.5)}, {}),
    "gradient stopped": ({}, {"activation": lambda x: F.gelu(x.detach())}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str) -> None:
    reference, candidate = (Block(**parts) for parts in FAULTS[name])
    verdict = attngraph.verify(reference, candidate, ids(), budget=20)
    assert not verdict and verdict.status == "differs" and verdict.differences[0].about in str(verdict)
    assert verdict.json()["status"] == "differs"


def test_floating_arguments_are_no_rounding() -> None:
    """An epsilon of a norm, seen through arguments that were given in float32."""
    x = (torch.randn(3, 8),)
    assert not attngraph.verify(nn.LayerNorm(8, eps=1e-6), nn.LayerNorm(8, eps=1.1e-6), x, budget=5)
    assert attngraph.verify(nn.LayerNorm(8), nn.LayerNorm(8), x, budget=5)


class Joined(nn.Module):
    """The same block in other words: torch's own attention, a mask of numbers, complex rotations."""

    def __init__(self) -> None:
        super().__init__()
        for name, part in Block().named_children():
            setattr(self, name, part)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.ids.weight)
        n = x.shape[1]
        q, k, v = (
            m(x).view(*x.shape[:2], -1, WIDTH // HEADS).permute(0, 2, 1, 3) for m in (self.q, self.k, self.v)
        )
        place = torch.arange(n)
        turn = torch.polar(
            torch.ones(n, 4, dtype=torch.float32), place[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
        ).to(torch.complex128)
        q, k = (
            torch.view_as_real(torch.complex(*t.double().chunk(2, -1)) * turn).mT.flatten(-2).to(x.dtype)
            for t in (q, k)
        )
        far = (place[:, None] - place >= 6) | (place > place[:, None])
        mask = torch.zeros(n, n, dtype=x.dtype).masked_fill(far, -torch.inf)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).reshape(*x.shape))
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        y = (x - mean) / torch.sqrt(variance + 1e-5) * self.norm.weight + self.norm.bias
        return x + self.down(F.gelu(self.up(y)))


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "itself": Block, "other words": Joined, "softmax by hand": lambda: Block(cap=lambda s: s + 0.0),
    "window in another form": lambda: Block(seen=lambda q, k: ~((k > q) | (q - k > 5))),
    "heads expanded": lambda: Block(share=lambda t: t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_a_port_that_is_right_is_equal(name: str) -> None:
    verdict = attngraph.verify(Block(), EQUAL[name](), ids(), budget=20)
    assert verdict, str(verdict)
    assert verdict.tried > 5 and verdict.worst <= 1


def test_what_a_call_cannot_show_is_found_in_the_programs() -> None:
    """A window that is off by one at a length that no call has, with both lines."""
    one, other = (Block(seen=lambda q, k, n=n: (k <= q) & (k > q - n)) for n in (4096, 4097))
    verdict = attngraph.verify(one, other, ids(), budget=5)
    (difference,) = verdict.differences
    assert difference.kind == "program" and "from 4,097 tokens on: query 4096, key 0" in difference.about
    assert difference.reference and difference.program != difference.other


class Padded(nn.Module):
    """Attention in a window, with an argument that says which tokens are real, in one layer or several."""

    def __init__(self, *windows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.windows = nn.Linear(8, 24), windows

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        for window in self.windows:
            q, k, v = self.qkv(x).chunk(3, -1)
            seen = (place <= place[:, None]) & (place > place[:, None] - window) & real[:, None]
            x = (q @ k.mT / 8**0.5).masked_fill(~seen, -1e9).softmax(-1) @ v
        return x


PADDED = torch.randn(2, 9, 8), torch.ones(2, 9, dtype=torch.bool)


def test_programs_that_read_the_same_argument_are_compared_at_all_sizes() -> None:
    verdict = attngraph.verify(Padded(4096), Padded(4097), PADDED, budget=2)
    assert not verdict and verdict.differences[0].kind == "program", str(verdict)
    assert "from 4,097 tokens on: query 4096, key 0" in verdict.differences[0].about
    assert attngraph.verify(Padded(4), Padded(4), PADDED, budget=2)


class Slopes(nn.Module):
    """A window, and a bias of each head by a weight, or by a buffer."""

    def __init__(self, window: int, slopes: Sequence[float] = (1e-3, 2e-3), is_buffer: bool = False) -> None:
        super().__init__()
        self.qkv, self.window = nn.Linear(8, 24), window
        values = torch.tensor([*slopes])
        if is_buffer:
            self.register_buffer("slopes", values, persistent=False)
        else:
            self.slopes = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        apart = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
        s = q @ k.mT / 2 + self.slopes[:, None, None] * apart
        hidden = (apart > 0) | (apart <= -self.window)
        return (s.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_programs_that_read_equal_weights_are_compared_at_all_sizes(is_buffer: bool) -> None:
    x = (torch.randn(2, 9, 8),)
    verdict = attngraph.verify(
        Slopes(4096, is_buffer=is_buffer), Slopes(4097, is_buffer=is_buffer), x, budget=2
    )
    assert not verdict and verdict.differences[0].code == "hides", str(verdict)
    assert "from 4,097 tokens on: query 4096, key 0" in verdict.differences[0].about
    assert attngraph.verify(Slopes(4, is_buffer=is_buffer), Slopes(4, is_buffer=is_buffer), x, budget=2)


def test_programs_that_read_buffers_of_other_values_are_compared_by_number() -> None:
    sides = Slopes(4, is_buffer=True), Slopes(4, (1e-3, 3e-3), is_buffer=True)
    verdict = attngraph.verify(*sides, (torch.randn(2, 9, 8),), budget=5)
    assert verdict.differences[0].code == "values" and "compared by number alone" in str(verdict)


def test_a_sink_of_another_size_is_a_difference_of_the_programs() -> None:
    (entry,) = attngraph.explain(Padded(4), *PADDED).attention
    one, other = (dataclasses.replace(entry, program=f"s = dot\nsink {n}", reads=()) for n in (0.5, 0.6))
    (difference,), _ = by_meaning([(one, other)], (1, 1), PADDED)
    assert "from 1 tokens on: query 0, key 0, head 0: they weigh this key differently" in difference.about
    assert by_meaning([(one, one)], (1, 1), PADDED) == ([], [])


def test_programs_that_read_other_arguments_or_shapes_are_said_to_be_compared_by_number() -> None:
    (entry,) = attngraph.explain(Padded(4), *PADDED).attention
    first, second = "tensor 0 of the arguments", "tensor 1 of the arguments"
    alone = dataclasses.replace(entry, program="s = dot + r0[q, k]", reads=(first,))
    for program, reads in (
        ("s = dot + r0[k]", (first,)),
        ("s = 2 * dot + r0[q, k]", (second,)),
        (alone.program, (second,)),
    ):
        other = dataclasses.replace(entry, program=program, reads=reads)
        found, notes = by_meaning([(alone, other)], (1, 1), PADDED)
        assert not found and "compared by number alone" in notes[0]


def test_attentions_that_are_not_as_many_are_paired_by_their_programs() -> None:
    verdict = attngraph.verify(Padded(2, 3, 4), Padded(2, 4), PADDED, budget=2)
    assert not verdict and [a.program == b.program for a, b in verdict.attentions] == [True, True]
    assert "2 have equal programs, 1 and 0 others are compared by number alone" in str(verdict)


def test_where_a_difference_enters_is_told() -> None:
    models = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.LayerNorm(8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1][4].eps = 1e-3
    models[0][0].requires_grad_(False)
    verdict = attngraph.verify(*models, (torch.randn(3, 8),), budget=5)
    assert not verdict and verdict.differences[0].enters == "4"


def test_weights_are_matched_by_name_value_and_shape() -> None:
    class Named(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.randn(8, 8)))

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.parameters()
            return (x @ a).tanh() @ b

    class Turned(Named):
        def forward(self, x: Tensor) -> Tensor:
            a, b = self.parameters()
            return (x @ a.T).tanh() @ b.T

    x, reference = (torch.randn(3, 8),), Named("first", "second")
    by_shape = attngraph.verify(reference, Named("one", "two"), x, budget=5)
    assert by_shape and "the reference's weights: 0 by name, 2 by value or shape" in str(by_shape)
    renamed = attngraph.verify(
        reference, Named("two", "one"), x, rename={"two": "second", "one": "first"}, budget=5
    )
    assert not renamed and renamed.status == "differs"
    turned = Turned("first", "second")
    with torch.no_grad():
        for mine, theirs in zip(turned.parameters(), reference.parameters(), strict=True):
            mine.copy_(theirs.T)
    del turned.second
    turned.register_parameter("other", nn.Parameter(reference.second.detach().T.clone()))
    lacking = attngraph.verify(reference, nn.Linear(8, 8), x)
    assert lacking.status == "cannot be compared" and "bias [8]" in str(lacking)


def test_functions_and_kernels_are_compared_by_number() -> None:
    def plain(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.mT / 3).softmax(-1) @ y

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 alone")
        return plain(x.detach(), y.detach()) * (1 if x.shape[-2] < 17 else 1.01)

    inputs = {"x": torch.randn(2, 5, 8), "y": torch.randn(2, 7, 8)}
    verdict = attngraph.verify(plain, kernel, inputs, gradients=False, budget=10)
    assert not verdict and "[2, 17, 8]" in verdict.differences[0].about
    assert (
        attngraph.verify(plain, lambda x, y: kernel(x[..., :16, :], y), inputs, gradients=False).status
        == "differs"
    )


def test_what_is_no_call_is_refused() -> None:
    with pytest.raises(TypeError, match="a tuple of arguments"):
        attngraph.verify(torch.sin, torch.sin, torch.randn(3))
    with pytest.raises(TypeError, match="the class itself"):
        attngraph.verify(nn.Linear, torch.sin, (torch.randn(3),))
    verdict = attngraph.verify(lambda x: x @ x, torch.sin, (torch.randn(3, 4),))
    assert verdict.status == "cannot be compared" and "the reference refuses the call" in str(verdict)


def test_the_call_that_is_given_is_compared_whatever_the_budget() -> None:
    verdict = attngraph.verify(torch.sin, torch.sin, (torch.randn(3),), budget=0)
    assert verdict and verdict.tried == 1 and "the budget of 0 s ended" in str(verdict)


def test_the_line_at_which_values_part_is_named_between_two_spellings() -> None:
    """The candidate scales its queries, not the scores, and has another function at the end."""

    def reference(x: Tensor) -> Tensor:
        weights = (x @ x.mT / 4).softmax(-1)
        return torch.tanh(weights @ x)

    def candidate(x: Tensor) -> Tensor:
        scores = (x / 4) @ x.mT
        found = scores.softmax(-1) @ x
        return torch.sigmoid(2 * found) * 2 - 1.01

    difference = attngraph.verify(reference, candidate, (torch.randn(2, 5, 8),)).differences[0]
    line = candidate.__code__.co_firstlineno + 3
    assert difference.candidate == f"tests/verify/test_verify.py:{line}"
    assert f"values part at {difference.candidate} of the candidate" in str(difference)


class Scaled(nn.Module):
    """A number that is computed in a constructor, and a table."""

    def __init__(self, width: int = 8, power: float = 0.5, base: float = 10.0) -> None:
        super().__init__()
        self.width, self.power, self.base = width, power, base
        self.scale = width**-power
        rates = base ** -torch.arange(width)
        self.register_buffer("rates", rates)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.rates


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(Scaled)
    return first + next(n for n, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("changed", [{"power": 1.0}, {"base": 9.0}])
def test_settings_that_differ_are_told(changed: dict[str, float]) -> None:
    verdict = attngraph.verify(Scaled(), Scaled(**changed), (torch.randn(2, 3, 8),), budget=5)
    about = [d.about for d in verdict.differences if d.kind == "setting"]
    (name, value) = next(iter(changed.items()))
    assert any(f"{name} is " in a and f"{value} in the candidate" in a for a in about), str(verdict)
    assert not attngraph.verify(Scaled(), Scaled(), (torch.randn(2, 3, 8),), budget=1).differences


def test_a_line_of_a_constructor_that_computes_another_number_is_named() -> None:
    other = Scaled()
    other.scale *= 1.01
    verdict = attngraph.verify(Scaled(), other, (torch.randn(2, 3, 8),), budget=5)
    (setting,) = (d for d in verdict.differences if d.kind == "setting")
    assert setting.candidate.endswith(f":{line_of('self.scale = ')}"), str(verdict)
