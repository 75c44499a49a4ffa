"""The simulator of Gluon kernels (`workshop/simulator`): right kernels are right in every order, and of each
rule of the machine a kernel that breaks it is told so, with the line."""

import re
import textwrap
from contextlib import nullcontext

import pytest
import torch

from workshop.__main__ import main
from workshop.simulator import Deadlock, Kernel, Wrong, launch, load
from workshop.simulator.cases import cases
from workshop.simulator.command import ENOUGH, of_mutants

CASES = {case.name: case for case in cases("cases.py")}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right_in_any_order(name):
    CASES[name].orders(3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right_in_many_orders(name):
    CASES[name].orders(200)


def test_sums_in_turns_are_the_same_each_time():
    case = CASES["backward"]
    found = [case.run(load(case.text), seed) for seed in range(4)]
    assert all(torch.equal(found[0], other) for other in found)


FORWARD, BACKWARD = CASES["forward"].text, CASES["backward"].text
ARRIVAL = "            mbarrier.arrive(empty.index(slot))\n"
LAST_WAIT = "            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))\n"
FENCE, STORE = "        hopper.fence_async_shared()\n", "        sums.index(W).store(dq)\n"
TURN = '        while gl.atomic_add(turns + i, 0, sem="acquire") != mine:\n            pass\n'
OTHERWISE = "gl.full([64, D], 1, gl.float32, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))"
FAULTS = {
    "a wait is missing": (
        FORWARD, "            mbarrier.wait(full.index(slot), turn // STAGES & 1)\n", "",
        r"race: the product .* reads ks\[0\] .*|reads ks\[0\], of which something was never written",
    ),
    "a place is empty before products with it are over": (
        FORWARD, LAST_WAIT + ARRIVAL, ARRIVAL + LAST_WAIT,
        r"race: the copy of v_desc .* writes vs\[.\] at line \d+: tma.* after: the product .* reads vs\[.\]",
    ),
    "a fence is missing": (
        FORWARD, FENCE, "", r"no fence_async_shared: the copy to o_desc .* reads os\[\d\] .* writes os",
    ),
    "a fence stands before the write": (
        BACKWARD, STORE + FENCE, FENCE + STORE, "no fence_async_shared: .* reads sums",
    ),
    "more bytes than are expected": (
        FORWARD, "k_desc.block_type.nbytes + v_desc.block_type.nbytes", "k_desc.block_type.nbytes",
        r"full\[0\] expects \d+ bytes in phase \d, \d+ are sent|reads vs\[0\], of which",
    ),
    "fewer bytes than are expected": (
        FORWARD, "2 * q_desc.block_type.nbytes", "2 * q_desc.block_type.nbytes + 16",
        r"deadlock:(.|\n)*q_full: phase 0 .* 0 of 1 arrivals and 16 of 16400 bytes",
    ),
    "a place is emptied twice": (
        FORWARD, ARRIVAL, ARRIVAL + ARRIVAL,
        r"double release: .* arrives twice in phase \d of empty\[0\]|nobody has waited for the one",
    ),
    "a barrier counts one group of two": (
        FORWARD, "(empty.index(slot), count=2)", "(empty.index(slot), count=1)", "a wait is missing|race",
    ),
    "a barrier counts too many": (
        FORWARD, "init(empty.index(slot), count=2)", "init(empty.index(slot), count=3)", "1 of 3 arrivals",
    ),
    "a barrier is not made": (FORWARD, "    mbarrier.init(q_empty, count=2)\n", "", "q_empty is used before"),
    "a phase is one off": (FORWARD, "(q_full, done & 1)", "(q_full, done & 1 ^ 1)", "race|never written"),
    "a copy is not waited for": (
        FORWARD, "done + 1\n    tma.store_wait(0)\n", "done + 1\n", "consume . ends while a copy",
    ),
    "a product is used before it is there": (
        FORWARD, "s = hopper.warpgroup_mma_wait(0", "s = hopper.warpgroup_mma_wait(1",
        r"an operation on a product that warpgroup_mma_wait has not given \(line \d+: s = hopper",
    ),
    "a box is not copied": (
        FORWARD, "[block * 128, 0], q_full, qs.index(0)", "[block * 128, 0], q_full, qs.index(1)",
        r"race: the copy of q_desc .* writes qs\[1\] .* after: the copy of q_desc",
    ),
    "a buffer lies otherwise than its boxes": (
        FORWARD, "[2, 64, D], q_desc.layout", "[2, 64, D], gl.NVMMASharedLayout(64, 16, 2)",
        r"boxes of q_desc lie as .*width=128.*; qs\[0\] lies as .*width=64",
    ),
    "too many registers": (FORWARD, "[240, 24]", "[256, 240]", "the first one would keep 8"),
    "registers by fours": (FORWARD, "[240, 24]", "[236, 24]", "multiples of 8 from 24 to 256"),
    "too much shared memory": (FORWARD, "[2, 64, D], o_desc", "[40, 64, D], o_desc", "may have 232448"),
    "layouts differ": (FORWARD, "acc = acc *", f"acc = acc * {OTHERWISE} *", "layout"),
    "an operand of another layout": (FORWARD, "(0, SUMS, 2)", "(0, SUMS, 4)", "has k_width 4"),
    "additions out of turn": (
        BACKWARD, TURN, "", r"race: the copy to dq_desc .* adds dq_desc .* after: the copy to dq_desc",
    ),
    "the next turn before the sum is there": (BACKWARD, "0, read_only=False", "0", "race: .* adds dq"),
    "a turn that tells nothing": (BACKWARD, '"release"', '"relaxed"', "race: the copy to dq_desc"),
    "a turn that never comes": (BACKWARD, "i, 1, sem", "i, 0, sem", r"turns\[0\] again and again"),
    "out of bounds": (BACKWARD, "gl.store(dv +", "gl.store(dv + 64 +", r"dv has 16384 elements, not"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told(name):
    text, old, new, said = FAULTS[name]
    assert old in text
    with pytest.raises(Wrong, match=f"(?s){said}"):
        CASES["forward" if text is FORWARD else "backward"].orders(3, text.replace(old, new))


def test_a_deadlock_says_who_waits_where_for_what():
    text = FORWARD.replace(ARRIVAL, "")
    asked = "mbarrier.wait(empty.index(slot), (turn // STAGES & 1) ^ 1)"
    line = text[: text.index(asked)].count("\n") + 1
    with pytest.raises(Deadlock, match=r"consume 1 at line \d+: mbarrier.wait\(full") as found:
        CASES["forward"].orders(1, text)
    assert f"""
  program (0, 0, 0) produce 2 at line {line}: {asked}
    waits for a phase of parity 0 of empty[0]: phase 0 (parity 0) is under way; missing are 2 of 2 arrivals \
and 0 of 0 bytes""" in str(found.value)


HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, fence_async_shared
L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
@gluon.jit
def meet(number: gl.constexpr):
    gl.inline_asm_elementwise("bar.sync 1, 256;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
"""
MEET = """
@gluon.jit
def write(buffer, out):
    buffer.store(gl.arange(0, 128, L))
    meet(1)
@gluon.jit
def read(buffer, out):
    meet(1)
    gl.store(out + gl.arange(0, 128, L), buffer.load(L))
@gluon.jit
def kernel(out):
    buffer = gl.allocate_shared_memory(gl.int32, [128], FLAT)
    gl.warp_specialize([(write, (buffer, out)), (read, (buffer, out))], [4])
"""
FACES = """
@gluon.jit
def kernel(out):
    buffer = gl.allocate_shared_memory(gl.int32, [2, 64], FLAT)
    for i in gl.static_range(2):
        buffer.index(i).store(gl.arange(0, 64, L))
    other = buffer.index(1)._reinterpret(gl.float32, [64], FLAT)
    other.store(gl.arange(0, 64, L).to(gl.float32))
    gl.store(out + gl.arange(0, 64, L), BUFFER.load(L).to(gl.int32))
"""
TOGETHER = """
@gluon.jit
def kernel(out):
    gl.store(out + gl.arange(0, 128, L), gl.arange(0, 128, L))
"""
BACKWARDS = """
@gluon.jit
def kernel(out):
    mine = gl.program_id(0)
    while gl.atomic_add(out, 0) != 1 - mine:
        pass
    gl.atomic_xchg(out, 2 - mine)
"""
PUBLISHED = """
@gluon.jit
def kernel(out):
    if gl.program_id(0) == 0:
        gl.store(out + 1 + gl.arange(0, 64, L), gl.arange(0, 64, L))
        gl.barrier()
        gl.atomic_xchg(out, 1, sem="release")
    else:
        while gl.atomic_add(out, 0, sem="acquire") == 0:
            pass
        gl.store(out + 1 + gl.arange(0, 64, L), gl.load(out + 1 + gl.arange(0, 64, L)) + 1)
"""


NO_MEETING = MEET.replace("meet(1)\n    gl.store", "gl.store")
THREE_MEET = MEET.replace("FLAT)\n    gl.warp", "FLAT)\n    meet(1)\n    gl.warp")
ASKED = 'gl.atomic_add(out, 0, sem="acquire")'
ADDED = TOGETHER.replace("gl.store", "gl.atomic_add")


@pytest.mark.parametrize(
    ("body", "programs", "options", "said"),
    [
        (MEET, 1, {}, None),
        (NO_MEETING, 1, {}, "never written|race"),
        (THREE_MEET, 1, {}, "128 of 256 arrivals"),
        (MEET.replace("], [4])", "], [8])"), 1, {}, "256 arrivals at named barrier 1, and only 128|race"),
        (FACES.replace("BUFFER", "other"), 1, {}, None),
        (FACES.replace("BUFFER", "buffer.index(0)"), 1, {}, None),
        (FACES.replace("BUFFER", "buffer.index(1)"), 1, {}, "never written by this layout"),
        (TOGETHER, 1, {}, None),
        (TOGETHER, 2, {}, r"race: program .* writes out \(of elements 0 to 127\)"),
        (ADDED, 2, {}, None),
        (ADDED, 2, {"ordered": True}, "race: program .* adds out"),
        (BACKWARDS, 2, {}, None),
        (BACKWARDS, 2, {"resident": 1}, "(?s)asks for out.* and 1 programs that have not begun"),
        (PUBLISHED, 2, {}, None),
        (PUBLISHED.replace("        gl.barrier()\n", ""), 2, {}, "race"),
        (PUBLISHED.replace('0, sem="acquire"', '0, sem="relaxed"'), 2, {}, "race"),
        (PUBLISHED.replace(ASKED, "gl.load(out, volatile=True)"), 2, {}, "race"),
        (BACKWARDS.replace("gl.atomic_add(out, 0)", "gl.load(out)"), 1, {}, "and not by an atomic operation"),
    ],
)
def test_what_warps_and_programs_share(body, programs, options, said):
    """A fault is told in every order."""
    module = load(HEAD + body)
    for seed in range(6):
        out = torch.zeros(129, dtype=torch.int32)
        with nullcontext() if said is None else pytest.raises(Wrong, match=said):
            Kernel(module.kernel, seed, **options)[(programs,)](out)
        assert said or out.any()


def test_numbers_are_those_of_the_card():
    text = """
    @gluon.jit
    def kernel(out):
        n = gl.arange(0, 128, L) - 64
        h = (gl.cast(n, gl.uint32) * 0x9E3779B1) >> 8
        found = gl.where(n < 0, n // 7 * 100 + n % 7, gl.cast(h & 0xFF, gl.int32))
        gl.store(out + gl.arange(0, 128, L), found)
    """
    out = torch.zeros(128, dtype=torch.int32)
    launch(load(HEAD + textwrap.dedent(text)).kernel, (1,), {"out": out})
    for n in range(-64, 64):
        quotient = int(n / 7)
        wanted = quotient * 100 + n - 7 * quotient if n < 0 else ((n * 0x9E3779B1) % 2**32 >> 8) & 0xFF
        assert out[n + 64] == wanted


@pytest.mark.parametrize("name", CASES)
def test_faults_of_synchronisation_are_noticed(name):
    """All but those that are listed as harmless, and those are there."""
    rows = of_mutants(CASES[name], 3)
    missed = [m for row in rows.values() for m in row["missed"]]
    assert not [m for m in missed if "MISSED" in m]
    assert sum(row["mutants"] for row in rows.values()) > 30
    assert all(any(m.endswith(why) for m in missed) for why in CASES[name].harmless.values())


def test_the_command(capsys):
    assert main(["simulate", "orders", "--orders", "2", "--only", "backward"]) == 0
    assert re.search(r"backward\n +orders +2", capsys.readouterr().out)
    assert 0.9 < ENOUGH < 1
