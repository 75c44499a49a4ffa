"""A plugin of pytest: emitted C runs as code of aarch64, with NEON, in QEMU's user mode.

    pytest -p on_arm tests/codegen/conformance -k decode

Each source is compiled with a main program that reads the memory which a call's argument leads to, runs the
function on one thread, and writes that memory back.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import gc
import hashlib
import os
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph.codegen.cpu import native, toolchain

FLAGS = [f for f in toolchain.FLAGS if f not in ("-march=native", "-shared", "-fPIC")]
GCC = ["aarch64-linux-gnu-gcc", "-march=armv8.2-a+fp16", "-static", *FLAGS]
MAIN = """
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **names) {
    FILE *file = fopen(names[1], "r+b");
    int64_t n;
    if (fread(&n, 8, 1, file) != 1) return 2;
    struct { int64_t at, size, leads; } *pieces = malloc(24 * n);
    if (fread(pieces, 24, n, file) != (size_t)n) return 2;
    char **mine = malloc(8 * n);
    for (int64_t i = 0; i < n; ++i) {
        mine[i] = aligned_alloc(64, (pieces[i].size + 191) / 64 * 64);
        if (fread(mine[i], 1, pieces[i].size, file) != (size_t)pieces[i].size) return 2;
    }
    for (int way = 0; way < 2; ++way) {
        for (int64_t i = 0; i < n; ++i)
            for (int64_t w = 0; pieces[i].leads && w < pieces[i].size / 8; ++w)
                for (int64_t j = 0; j < n; ++j) {
                    int64_t *word = (int64_t *)mine[i] + w, from = way ? (int64_t)mine[j] : pieces[j].at;
                    int64_t to = way ? pieces[j].at : (int64_t)mine[j];
                    if (*word >= from && *word < from + pieces[j].size) { *word += to - from; break; }
                }
        if (!way) FUNCTION((void *)mine[0]);
    }
    fseek(file, 8 + 24 * n, SEEK_SET);
    for (int64_t i = 0; i < n; ++i) fwrite(mine[i], 1, pieces[i].size, file);
    return fclose(file);
}
"""
sources: dict[int, tuple[str, str]] = {}
"""The name and the source of each function, by its address."""
ran = 0


@functools.cache
def program(name: str, source: str) -> str:
    path = Path(tempfile.gettempdir()) / f"on-arm-{os.getuid()}"
    path.mkdir(exist_ok=True, mode=0o700)
    made = path / hashlib.sha256(f"{name}\n{source}\n{GCC}{MAIN}".encode()).hexdigest()[:24]
    if not made.exists():
        text = source + MAIN.replace("FUNCTION", name)
        command = [*GCC, "-x", "c", "-", "-o", f"{made}.new", "-lm"]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        os.replace(f"{made}.new", made)
    return str(made)


def pieces(argument: Any) -> list[tuple[int, int, bool]]:
    """(address, bytes, whether it holds addresses) of what an argument leads to, itself first."""
    known: dict[int, tuple[int, bool]] = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            if found.layout is torch.strided and found.untyped_storage().nbytes():
                known[found.untyped_storage().data_ptr()] = (found.untyped_storage().nbytes(), False)
        elif isinstance(found, ctypes.Structure | ctypes.Array):
            known.setdefault(ctypes.addressof(found), (ctypes.sizeof(found), True))
    starts, taken = sorted(known), dict[int, tuple[int, bool]]()
    waiting = [ctypes.addressof(argument)]
    known[waiting[0]] = (ctypes.sizeof(argument), True)
    while waiting:
        start = waiting.pop()
        if start in taken:
            continue
        size, leads = taken[start] = known[start]
        for word in struct.unpack(f"{size // 8}q", ctypes.string_at(start, size // 8 * 8)) if leads else ():
            place = bisect.bisect(starts, word) - 1
            if place >= 0 and word < starts[place] + known[starts[place]][0]:
                waiting.append(starts[place])
    return [(start, *taken[start]) for start in taken]


def run(function: Any, argument: Any, members: int) -> None:
    global ran
    name, source = sources[native.address(function)]  # type: ignore[index]
    found = pieces(argument)
    head = struct.pack("q", len(found)) + b"".join(struct.pack("3q", *piece) for piece in found)
    with tempfile.NamedTemporaryFile() as file:
        file.write(head + b"".join(ctypes.string_at(start, size) for start, size, _ in found))
        file.flush()
        done = subprocess.run(
            ["qemu-aarch64", program(name, source), file.name], capture_output=True, check=False
        )
        assert done.returncode == 0, (name, done.returncode, done.stderr[-500:])
        file.seek(len(head))
        for start, size, _ in found:
            ctypes.memmove(start, file.read(size), size)
    ran += 1


@pytest.fixture(autouse=True)
def on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    build = toolchain.build

    def noted(source: str) -> Any:
        library, seconds = build(source)
        for name in toolchain._exported(source):
            function = getattr(library, name)
            sources[native.address(function)] = (name, source)  # type: ignore[index]
        return library, seconds

    monkeypatch.setattr(toolchain, "build", noted)
    monkeypatch.setattr(native, "run", run)


def pytest_sessionfinish() -> None:
    print(f"\n{ran} calls ran on aarch64")
