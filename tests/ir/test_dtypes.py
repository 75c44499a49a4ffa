"""The one table of dtypes: names in graphs are unique, and C elements have the size of PyTorch's."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from attngraph.codegen.scalar.form import KINDS
from attngraph.ir.dtypes import DTYPES, FLOATS, NAMED, SCALED

HEADER = Path(__file__).parents[2] / "codegen" / "cpu" / "c" / "elements.h"
BYTES_IN_C = {
    "float": 4, "_Float16": 2, "uint16_t": 2, "int64_t": 8, "int32_t": 4, "int8_t": 1, "uint8_t": 1,
}  # fmt: skip


def test_every_dtype_is_found_by_its_names() -> None:
    assert all(NAMED[row.name] is row and getattr(torch, row.name) is dtype for dtype, row in DTYPES.items())
    short = [row.short for row in DTYPES.values() if row.short]
    assert len(set(short)) == len(short)


def test_elements_in_c_have_the_dtypes_bytes() -> None:
    assert all(BYTES_IN_C[row.c] == row.bytes for row in DTYPES.values() if row.c)


def test_elements_that_weights_and_caches_have_are_named_in_the_header() -> None:
    found = re.search(r"enum \{ NONE, (.*) \};", HEADER.read_text(encoding="utf-8"))
    assert found is not None
    assert sorted(found[1].split(", ")) == sorted(row.word for row in DTYPES.values() if row.word)
    assert all(DTYPES[dtype].word for dtype in (*FLOATS, *SCALED))


def test_kinds_are_those_of_the_scalar_form() -> None:
    assert {row.kind for row in DTYPES.values() if row.kind} == set(KINDS)
