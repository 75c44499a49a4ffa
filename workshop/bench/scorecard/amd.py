"""AMD's assembly as Triton's compiler prints it, counted instruction by instruction.

Loads are `buffer_load` where Triton knows that tensors are smaller than 2 GiB. It sees that when it launches
a kernel; it has to be told when one is compiled ahead of time (`Request.small`). Else they are `global_load`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from workshop.bench.scorecard.code import COUNTS, Code, Instruction, Work, parse

_LABEL = re.compile(r"^(\.LBB\w+):")
_LINE = re.compile(r"^\s+([a-z]\w+)\s*([^;]*)")
LANES = 64


def read(text: str) -> Code:
    return parse(text, _LABEL, _instruction)


def _instruction(line: str) -> Instruction | None:
    found = _LINE.match(line)
    if found is None or line.lstrip().startswith("."):
        return None
    name, operands = found[1], found[2].strip()
    return Instruction(name, operands, operands if "branch" in name else "", name in ("s_branch", "s_endpgm"))


def multiplies(instruction: Instruction) -> bool:
    return instruction.name.startswith("v_mfma")


def count(loop: Sequence[Instruction]) -> Work:
    """What a wave does in one turn of a loop."""
    found = dict.fromkeys(COUNTS, 0)
    pending: list[int] = []
    for instruction in loop:
        name = instruction.name
        if multiplies(instruction):
            found["products"] += 1
            found["flops"] += _product(name)
        elif re.match(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_", name):
            found["special"] += 1
            found["exponentials"] += name.startswith("v_exp")
        elif re.match(r"v_(pk_)?(add|sub|mul|fma|fmac|mac)\w*_f(16|32)", name):
            found["fused"] += 1
        elif name.startswith("ds_read"):  # factors of products
            found["operand_bytes"] += LANES * _width(name)
        elif name.startswith(("ds_", "scratch_")):
            found["shared_bytes"] += LANES * _width(name)
        elif name.startswith(("global_load", "buffer_load", "flat_load")):
            found["loaded_bytes"] += LANES * _width(name)
            found["groups"] += 1
        elif name.startswith("v_"):
            found["integer"] += 1
        found["stops"] += name == "s_barrier"
        if name == "s_waitcnt" and (waited := re.search(r"vmcnt\((\d+)\)", instruction.operands)):
            pending.append(int(waited[1]))
    return Work(len(loop), pending=min(pending, default=None), by_groups=False, steps=(), **found)


def _product(name: str) -> int:
    shape = re.search(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?", name)
    if shape is None:
        return 0
    m, n, k = (int(extent) for extent in shape.groups()[:3])
    return 2 * m * n * k * int(shape[4] or 1)


def _width(name: str) -> int:
    """Bytes that a load or store moves for each lane."""
    if (words := re.search(r"dwordx(\d)", name)) is not None:
        return 4 * int(words[1])
    twice = 2 if "2_b" in name or "2st64" in name else 1
    bits = re.search(r"_b(\d+)", name)
    return twice * int(bits[1]) // 8 if bits else 4
