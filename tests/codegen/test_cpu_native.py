"""C as Python sees it (`codegen/cpu/native.py`): structs have the layout that the compiler gives them."""

from __future__ import annotations

import ctypes

import pytest

from attngraph.codegen.cpu import native, toolchain

STRUCTS = {
    "base.h": ("Read", "Call", "struct Gradients"),
    "chain.h": ("Link", "Counters", "Chain"),
    "carried.h": ("Gather", "Numbers", "Paged", "Keep", "LastTokens", "Sums"),
    "steps.h": ("Stream", "Slot", "Copied", "Loop", "One"),
}


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_lie_where_the_compiler_puts_them(name: str) -> None:
    wanted, places = [], []
    for word in STRUCTS[name]:
        made = native.struct(name, word.removeprefix("struct "))
        wanted += [ctypes.sizeof(made), *(getattr(made, field).offset for field, _ in made._fields_)]
        fields = [field.rstrip("_") for field, _ in made._fields_]
        places += [f"sizeof({word})", *(f"offsetof({word}, {field})" for field in fields)]
    source = "\n".join([
        "#define FLOAT32", "#define STATE float", "#include <stddef.h>", native.header("functions.h"),
        native.header(name), f"const int64_t found[] = {{{', '.join(places)}}};",
    ])  # fmt: skip
    code, _ = toolchain.build(source)
    assert list((ctypes.c_int64 * len(places)).in_dll(code, "found")) == wanted


def test_numbers_are_those_of_the_enums() -> None:
    places = native.numbers("tokens.h")
    assert [places[name] for name in ("TOKENS", "MEMBERS", "PHASE", "COUNTERS")] == [0, 1, 5, 8]
    assert native.numbers("base.h")["BLOCK_K"] == 64
    assert "TURNED" not in native.numbers("backward.h")  # a formula
