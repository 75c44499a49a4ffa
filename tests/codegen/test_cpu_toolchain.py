"""Where compiled libraries come from: the compiler that is found, the cache that is trusted, and what
happens without either."""

import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu import call, toolchain
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import kernels
from attngraph.ir.ops.kernels import KERNELS

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(call, "_libraries", {})
    for cached in (toolchain.compiler, toolchain._identity, toolchain._temporary):
        cached.cache_clear()
    yield
    for cached in (toolchain.compiler, toolchain._identity, toolchain._temporary):
        cached.cache_clear()


@pytest.fixture
def cc() -> None:
    try:
        toolchain.compiler()
    except toolchain.CompilerError as error:
        pytest.skip(str(error))


def operands(tokens: int = 1024, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 1, tokens, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    return q, k, v


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "attngraph").iterdir())


@pytest.fixture
def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(toolchain, "_compile", refuse)


@pytest.mark.usefixtures("cc")
def test_a_source_is_compiled_once_and_then_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, seconds = toolchain.build(SOURCE)
    assert library.answer() == 42 and seconds > 0
    assert len(entries(tmp_path)) == 1, "something is left beside the library"
    assert (tmp_path / "attngraph").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(toolchain, "_compile", lambda *_: pytest.fail("compiled again"))
    again, seconds = toolchain.build(SOURCE)
    assert again.answer() == 42 and seconds == 0


@pytest.mark.usefixtures("cc")
def test_what_was_begun_is_compiled_in_the_background_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_ = [], toolchain._compile
    may_go_on = threading.Event()

    def watched(source: str, path: Path) -> None:
        assert may_go_on.wait(60)
        compiled.append(threading.current_thread())
        compile_(source, path)

    monkeypatch.setattr(toolchain, "_compile", watched)
    toolchain.begin(SOURCE)
    toolchain.begin(SOURCE)
    may_go_on.set()
    assert toolchain.build(SOURCE)[0].answer() == 42
    assert len(compiled) == 1 and compiled[0] is not threading.main_thread()
    assert not toolchain._under_way


@pytest.mark.usefixtures("cc")
def test_what_fails_in_the_background_is_raised_where_it_is_needed() -> None:
    toolchain.begin("no C")
    with pytest.raises(toolchain.CompilerError, match="failed"):
        toolchain.build("no C")


@pytest.mark.usefixtures("cc")
@pytest.mark.parametrize("harm", ["kept", "cut short", "changed", "emptied"])
def test_a_damaged_entry_is_made_anew(harm: str) -> None:
    path = toolchain._entry(SOURCE)
    toolchain._compile(SOURCE, path)
    assert toolchain._is_whole(path)
    data = path.read_bytes()
    damage = {"cut short": data[:-7], "changed": data[:99] + b"?" + data[100:], "emptied": b"", "kept": data}
    path.write_bytes(damage[harm])
    library, seconds = toolchain.build(SOURCE)
    assert library.answer() == 42 and (seconds > 0) == (harm != "kept")
    assert toolchain._is_whole(path)


@pytest.mark.usefixtures("cc")
def test_other_flags_and_other_compilers_have_entries_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain.build(SOURCE)
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-DOTHER"))
    toolchain._identity.cache_clear()
    toolchain.build(SOURCE)
    assert len(entries(tmp_path)) == 2


@pytest.mark.usefixtures("cc")
def test_the_entries_not_used_for_longest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "ENTRIES", 2)
    sources = [SOURCE + f"/* {number} */\n" for number in range(3)]
    for age, source in ((300, sources[0]), (200, sources[1])):
        toolchain.build(source)
        os.utime(toolchain._entry(source), (time.time() - age,) * 2)
    assert toolchain.build(sources[0])[1] == 0, "used again, so no longer the oldest"
    toolchain.build(sources[2])
    assert entries(tmp_path) == sorted(toolchain._entry(s) for s in (sources[0], sources[2]))


@pytest.mark.usefixtures("cc")
@pytest.mark.parametrize("fault", ["foreign", "open to others", "a link", "a file"])
def test_a_folder_that_others_may_write_to_is_not_used(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    toolchain._identity()
    path = tmp_path / "attngraph"
    if fault == "a file":
        path.write_text("")
    elif fault == "a link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir(mode=0o700)
        (path / "bait.so").write_bytes(b"not to be loaded")
    if fault == "open to others":
        path.chmod(0o777)
    if fault == "foreign":
        owner = path.stat().st_uid
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with caplog.at_level(logging.WARNING, logger="attngraph.codegen.cpu"):
        folder = toolchain.folder()
        assert toolchain.folder() == folder
    assert path not in (folder, *folder.parents)
    assert len(caplog.records) == 1 and str(path) in caplog.text
    if fault != "foreign":
        assert toolchain.build(SOURCE)[0].answer() == 42


@pytest.mark.usefixtures("cc")
def test_a_library_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "probe.so"
    toolchain._compile(SOURCE, path)
    assert toolchain._is_whole(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert not toolchain._is_whole(path)


def test_without_a_compiler_the_other_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    program = parse("s = 0.25 * dot; keep k <= q")
    reason = KERNELS["cpu.compiled"].refuse(program, operands())
    assert reason is not None and "no C compiler" in reason and "/nowhere/cc" in reason
    assert kernels.choose(program, operands()).name == "cpu.flash"
    assert kernels.choose(parse("keep k > q"), operands()).name == "cpu.tiled"


@pytest.mark.parametrize("command", ["false", "a compiler that fails"])
def test_a_compiler_that_fails_is_reported_once_and_pytorch_computes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if command != "false":
        script = tmp_path / "cc"
        script.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho no space left >&2\nexit 1\n'
        )
        script.chmod(0o755)
        command = str(script)
    monkeypatch.setenv("CC", command)
    program, given = parse("s = 0.25 * dot; keep k <= q and q - k < 9"), operands()
    with caplog.at_level(logging.WARNING, logger="attngraph.codegen.cpu"):
        for _ in range(2):
            out = KERNELS["cpu.compiled"].forward(program, given, [], [])[0]
    torch.testing.assert_close(out, KERNELS["reference"].forward(program, given, [], [])[0])
    assert len(caplog.records) == 1
    assert command in caplog.text and ("no space left" in caplog.text or command == "false")


@pytest.mark.parametrize(("ends", "told"), [("exit 0", "made no library"), ("", "lacks attngraph_")])
@pytest.mark.usefixtures("cc")
def test_a_compiler_that_ends_well_without_what_was_asked_of_it_is_reported_too(
    ends: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, script = toolchain.compiler()[0], tmp_path / "cc"
    last = 'for a; do [ "$p" = -o ] && out="$a"; p="$a"; done'
    other = f'echo "int x;" | {real} -shared -fPIC -x c - -o "$out"'
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{ends}\n{last}\n{other}\n')
    script.chmod(0o700)
    toolchain.compiler.cache_clear()
    monkeypatch.setenv("CC", str(script))
    program, given = parse("s = 0.375 * dot; keep k <= q + 3"), operands()
    with caplog.at_level(logging.WARNING, logger="attngraph.codegen.cpu"):
        out = KERNELS["cpu.compiled"].forward(program, given, [], [])[0]
    torch.testing.assert_close(out, KERNELS["reference"].forward(program, given, [], [])[0])
    assert told in caplog.text and str(script) in caplog.text


@pytest.mark.usefixtures("cc")
def test_seconds_of_compiling_are_told() -> None:
    program = parse("s = 0.25 * dot; keep k <= q and q - k < 11")
    assert KERNELS["cpu.compiled"].remarks(program) == ()
    KERNELS["cpu.compiled"].forward(program, operands(), [], [])
    assert 0 < call.compile_seconds(program) < 300
    (remark,) = KERNELS["cpu.compiled"].remarks(program)
    assert re.fullmatch(r"the C compiler took \d+\.\d s, once: what it makes is kept on disk", remark)


@pytest.mark.usefixtures("forbid_compiling", "cc")
def test_small_calls_do_not_wait_for_a_compiler() -> None:
    for text in ("s = 0.25 * dot; keep k <= q", "keep q - k < 9"):
        program, given = parse(text), operands(256)
        out = KERNELS["cpu.compiled"].forward(program, given, [], [])[0]
        torch.testing.assert_close(out, KERNELS["reference"].forward(program, given, [], [])[0])


@pytest.mark.usefixtures("cc")
def test_what_is_not_written_as_c_is_refused_with_a_reason() -> None:
    kernel = KERNELS["cpu.compiled"]
    assert kernel.refuse(parse("keep k <= q"), operands()) is None
    assert "float64" in str(kernel.refuse(parse("keep k <= q"), operands(dtype=torch.float64)))
    assert "whole division" in str(kernel.refuse(parse("keep q // (k - 5) == 0"), operands()))
    q, k, v = (t.to("meta") for t in operands())
    assert "meta" in str(kernel.refuse(parse("keep k <= q"), (q, k, v)))


@pytest.mark.usefixtures("cc")
def test_what_cannot_be_served_when_called_is_computed_by_pytorch() -> None:
    """Reads of float64, divisors that turn out not to be positive, and indices out of range."""
    given = operands()
    for text, reads, sizes in (
        ("s = dot + r0[k]", [torch.randn(1024, dtype=torch.float64)], ()),
        ("keep q // n0 == k // n0", [], (-16,)),
        ("keep k <= q + n0", [], (1 << 30,)),
        ("s = dot + r0[k]", [torch.randn(1024).to(torch.int8)], ()),
    ):
        program = parse(text)
        out, lse = KERNELS["cpu.compiled"].forward(program, given, reads, sizes)
        expected = KERNELS["reference"].forward(program, given, reads, sizes)
        torch.testing.assert_close(out, expected[0].to(out.dtype))
        torch.testing.assert_close(lse, expected[1].to(lse.dtype))
    for text in ("s = dot + r0[k - q]", "s = dot + r0[k + 1]", "s = dot + r0[2 * q]", "s = dot + r0[k * 2]"):
        with pytest.raises(IndexError, match="in range"):
            KERNELS["cpu.compiled"].forward(parse(text), given, [torch.randn(1024)], [])


def test_a_compiler_with_arguments_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.run(["sh", "-c", "command -v cc"], capture_output=True, check=False).returncode:
        pytest.skip("there is no cc")
    monkeypatch.setenv("CC", "env cc")
    assert toolchain.compiler()[1:] == ("cc",)
    assert toolchain.build(SOURCE)[0].answer() == 42
