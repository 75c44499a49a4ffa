"""Kernels with groups of warps in the simulator (`workshop/simulator`): in many orders of their warps, and
with faults of synchronisation written into them. In one order each, `conformance/` has all programs."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from conformance import simulated
from conformance.compare import REFERENCE, forward, in_double, largest
from conformance.programs import CASES, CORE, Call, Shape
from conformance.simulated import Simulated
from torch import Tensor

from attngraph.codegen.triton import attempts, visits
from attngraph.codegen.triton.emit import Kernel
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse

pytest.importorskip("triton", reason="kernels in Gluon are parts of triton")
from workshop.simulator import load
from workshop.simulator.cases import Case
from workshop.simulator.mutants import mutants, noticed

pytestmark = pytest.mark.usefixtures("triton_compiler")
SMALL = Blocks(128, 64, 4, 2, groups=True)
"""Tiles of which short calls have many."""
FORWARD, BACKWARD = Shape(1, 2, 1, 460, 64, 64), Shape(1, 2, 1, 330, 64, 64)


@pytest.fixture(autouse=True)
def errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel does not run, no other is tried; lists are made for small calls too."""
    monkeypatch.setattr(attempts, "once", lambda plan, device, call: (call(plan), ""))
    monkeypatch.setattr(visits, "WORTH", 1)


def outputs(name: str) -> Callable[[], None]:
    """What holds the results of a call to those in float64."""
    call = CASES[name].of(FORWARD, torch.bfloat16)
    wanted = forward(REFERENCE, in_double(call))
    kernel = Simulated(SMALL)

    def run() -> None:
        for found, exact in zip(forward(kernel, call), wanted, strict=True):
            usable = exact.isfinite()
            assert largest((found - exact)[usable]) <= 2e-2 * max(1.0, largest(exact))

    return run


def gradients(call: Call, ordered: bool = True) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """Gradients of q, k and v in float64, and what computes them by groups of warps. Nothing that is read
    wants one."""
    for tensor in call.operands:
        tensor.requires_grad_()
    program, exact = parse(call.text), in_double(call)
    results, usual = forward(REFERENCE, exact), forward(REFERENCE, call)
    torch.manual_seed(0)
    grads = torch.randn_like(usual[0]), 0.3 * torch.randn_like(usual[1])
    doubles = grads[0].double(), grads[1].double()
    wanted = REFERENCE.backward(program, exact.operands, exact.reads, exact.sizes, results, doubles)
    kernel = Simulated(SMALL, ordered)
    assert simulated.why_left(kernel, call) is None
    given = usual[0].detach(), usual[1].detach()

    def run() -> list[Tensor]:
        found = kernel.backward(program, call.operands, call.reads, call.sizes, given, grads)
        return [t.detach() for t in found[:3] if t is not None]

    return [t for t in wanted[:3] if t is not None], run


def check_gradients(call: Call, ordered: bool = True) -> Callable[[], None]:
    wanted, run = gradients(call, ordered)

    def check() -> None:
        for found, exact in zip(run(), wanted, strict=True):
            assert largest(found.double() - exact) <= 3e-2 * max(1.0, largest(exact))

    return check


def in_orders(run: Callable[[], object], count: int) -> None:
    for seed in range(count):
        with mock.patch.object(simulated, "_seeds", iter(range(1000 * seed, 1000 * seed + 1000))):
            run()


SERVED = sorted(name for name in CORE if not {"D", "Dv", "B"} & CASES[name].shape.keys())


@pytest.mark.parametrize("name", ["causal", "fill of -1e9", "documents"])
def test_outputs_are_right_in_some_orders(name: str) -> None:
    in_orders(outputs(name), 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_outputs_are_right_in_fifty_orders(name: str) -> None:
    in_orders(outputs(name), 50)


FORMULAS = {
    "causal": ("s = 0.125 * dot; keep k <= q", ()),
    "window": ("s = 0.125 * dot; keep k <= q and q - k < 90", ()),
    "slopes": ("s = 0.125 * dot + r0[h] * (k - q); keep k <= q", ("h",)),
    "softcap, sink": ("s = 5 * tanh(dot / 40); keep k <= q + 20; sink r0[h]", ("h",)),
    "by distance": ("s = 0.125 * dot + r0[h, k - q + n0]", ("h,d",)),
    "dropout": ("s = 0.125 * dot; keep k <= q; p = where(0.1 <= random(5, b, h, q, k), p / 0.9, 0)", ()),
    "large scores": ("s = 40 * dot; keep k <= q", ()),
}  # fmt: skip


def formulas(name: str) -> Call:
    text, reads = FORMULAS[name]
    case = dataclasses.replace(
        CASES["causal"], text=text, reads=reads, sizes=("last",) if "n0" in text else ()
    )
    return case.of(BACKWARD, torch.bfloat16)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_right_where_nothing_that_is_read_wants_one(name: str, ordered: bool) -> None:
    in_orders(check_gradients(formulas(name), ordered), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_right_in_fifty_orders(name: str) -> None:
    in_orders(check_gradients(formulas(name)), 50)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_gradients_are_the_same_in_all_orders(name: str) -> None:
    """To the bit: sums of queries' gradients are made in the order of keys."""
    _, run = gradients(formulas(name))
    found: list[list[Tensor]] = []
    in_orders(lambda: found.append(run()), 4)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


# --- faults -------------------------------------------------------------------------------------------

TURNS = "turns say when a group multiplies, which nothing depends on"
MORE = "it waits for more than it needs"
LATER_ALL = "the next wait, in the same turn, says so too, before anything is asked of the result"
IN_FORWARD = {
    r"(later|earlier): mbarrier\.(wait|arrive)\(turns.*": TURNS,
    r"- 1: s = .*": MORE,
    r"earlier: mbarrier\.arrive\(key_free.*":
        "the producer asks for the place of values in between, which is free after these products",
    r"(left out|earlier): mbarrier\.arrive\((key|value)_free.* \(#[234]\)":
        "of the last tiles of a program: nobody waits for their places",
    r"later: acc = .* \(#[34]\)": "the last products: past the last arrival, which nobody waits for",
    r"(left out|earlier|later): gl\.barrier.*":
        "a group's store is one event here, so its other warps' parts of it cannot be late",
    r"later: mbarrier\.wait\(key_free.* \(#2\)": "past the next wait, of values, which comes later",
    r"later: s = .*": LATER_ALL,
}  # fmt: skip
IN_BACKWARD = {
    r"- 1: .*": MORE,
    r"later: (weighed|sum_value) = .*": LATER_ALL,
    r"later: hopper\.fence_async_shared\(\) \(#1\)":
        "the products in between read registers and other places",
    r"earlier: mbarrier\.arrive\(grad_free.*":
        "the producer asks for the place of queries first, which is free after these products",
    r"later: mbarrier\.wait\(grad_free.*": "past the expectation of bytes, which is no access",
}  # fmt: skip


def case_of(name: str, is_forward: bool) -> Case:
    run = outputs(name) if is_forward else check_gradients(formulas(name))
    emitted: list[Kernel] = []

    def with_module(module: Any, seed: int) -> None:
        def loaded(kernel: Kernel) -> Any:
            emitted.append(kernel)
            return getattr(module or load(kernel.source, kernel.name), kernel.name)

        seeds = iter(range(1000 * seed, 1000 * seed + 1000))
        with mock.patch.multiple(simulated, loaded=loaded, _seeds=seeds):
            run()

    with_module(None, 0)
    return Case(name, emitted[0].source, with_module, IN_FORWARD if is_forward else IN_BACKWARD)


MUTATED = [("causal", True), ("fill of -1e9", True), ("causal", False), ("window", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_forward"), MUTATED)
def test_faults_of_synchronisation_are_noticed(name: str, is_forward: bool) -> None:
    """At least 95 % of those that are not said to be harmless."""
    case = case_of(name, is_forward)
    found = {mutant.name: noticed(case, mutant, 3) for mutant in mutants(case.text)}
    missed = [name for name, said in found.items() if not said]
    silent = [name for name in missed if not any(re.fullmatch(each, name) for each in case.harmless)]
    assert len(silent) <= 0.05 * (len(found) - len(missed) + len(silent)), "\n".join(silent)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
