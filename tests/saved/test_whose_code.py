"""Whose code a trace ran: torch's, Python's and the tools' versions count instead of their code, wherever
they are installed; all other packages are the user's. Of the user's code a saved model gives no text away."""

from __future__ import annotations

import argparse
import dis
import inspect
import json
import os
import re
import sysconfig
from pathlib import Path
from typing import ClassVar

import networkx
import numpy
import pytest
import sympy
import torch

import attngraph
from attngraph.capture.state import ran
from attngraph.capture.state.content import Content, names_of, ran_of
from attngraph.capture.state.ran import is_users
from attngraph.capture.state.scope import Ran, chains_in, nested
from attngraph.models import targets


def test_torch_and_its_tools_and_the_library_are_not_the_users() -> None:
    for module in (torch, sympy, networkx, json, os):
        assert module.__file__ is not None and not is_users(module.__file__)


def test_packages_of_another_environment_are_the_users() -> None:
    """In an environment made with --system-site-packages, packages lie inside of Python's own library."""
    library = Path(sysconfig.get_path("stdlib"))
    for folder in ("site-packages", "dist-packages"):
        assert is_users(str(library / folder / "transformers" / "models" / "gpt.py"))
    assert not is_users(str(library / "json" / "decoder.py"))


def test_a_tool_is_known_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "another_tool").mkdir()
    (tmp_path / "another_tool" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ran, "TOOLS", ("another_tool",))
    ran._folders_of_tools.cache_clear()
    is_users.cache_clear()
    try:
        assert not is_users(str(tmp_path / "another_tool" / "core.py"))
        assert is_users(str(tmp_path / "another_tools" / "core.py"))
    finally:
        ran._folders_of_tools.cache_clear()
        is_users.cache_clear()


def test_a_saved_model_has_no_text_of_the_users_code(tmp_path: Path) -> None:
    model, (ids,) = targets.tiny_decoder_lm(tokens=12)
    compiled = attngraph.compile(model.eval(), min_scores=0)
    with torch.no_grad():
        compiled(ids)
    assert compiled.report.code.stretches
    folder = compiled.save(tmp_path / "saved")
    again = attngraph.load(folder, model)
    with torch.no_grad():
        again(ids)
    assert not again.report.code.stretches and again.report.attention == compiled.report.attention
    assert not any("def forward" in file.read_text("utf-8") for file in folder.rglob("*.json"))


def test_of_thousands_of_modules_only_those_of_the_codes_files_are_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = targets.tiny_decoder_lm.__code__
    resolved: list[str] = []
    resolve = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: (resolved.append(path), resolve(path))[1])
    found, lost = names_of([code], Content)
    assert found == ["attngraph.models.targets:tiny_decoder_lm"] and not lost
    assert {os.path.basename(path) for path in resolved} == {os.path.basename(code.co_filename)}


def test_global_names_are_those_that_pythons_own_reader_finds() -> None:
    """Also in code so long that numbers of names take several instructions."""
    long = "\n".join(f"name_{n} = other_{n}.part_{n}(word_{n}=1)" for n in range(300))
    sources = [Path(m.__file__).read_text("utf-8") for m in (dis, inspect, argparse, json.decoder)]
    for source in (
        long,
        f"def f():\n    global name_7\n    {long.replace(chr(10), chr(10) + '    ')}",
        *sources,
    ):
        for code in nested(compile(source, "a file", "exec")):
            read = [i for i in dis.get_instructions(code) if i.opcode in dis.hasname]
            wanted = {i.argval for i in read if re.search("GLOBAL|NAME", i.opname)}
            assert {chain.root for chain in chains_in(code)} == wanted


def test_what_code_takes_of_a_module_is_told_from_the_module_itself() -> None:
    def uses() -> object:
        from json import decoder as theirs
        from json import dumps

        return dis.opname[0], json.decoder.JSONDecoder.decode, inspect, dumps, theirs

    found = {(c.root, *c.attributes) for c in chains_in(uses.__code__)}
    assert found == {
        ("dis", "opname"), ("json", "decoder", "JSONDecoder", "decode"), ("inspect",), ("json", "decoder"),
        ("json", "dumps"),
    }  # fmt: skip


def test_what_a_class_holds_is_described_also_where_two_classes_extend_it() -> None:
    class Base:
        kinds: ClassVar = {"a", "b"}

    class First(Base):
        pass

    class Second(Base):
        pass

    def described() -> dict[str, str]:
        found = Content()
        found.of("it", (First, Second))
        return found.lines

    before = described()
    Base.kinds = {"a", "c"}
    assert described() != before


size = 3
named = 4


def uses_a_name_as_an_attribute(x: torch.Tensor) -> int:
    return x.size(0) + getattr(x, "named", 0)


def test_a_name_that_code_uses_as_an_attribute_is_no_global(monkeypatch: pytest.MonkeyPatch) -> None:
    def described() -> dict[str, str]:
        found = Content(ran_of([f"{__name__}:{uses_a_name_as_an_attribute.__name__}"], Content).scope())
        found.everything(())
        return found.lines

    before = described()
    monkeypatch.setitem(globals(), "size", 5)
    assert described() == before
    monkeypatch.setitem(globals(), "named", 5)  # a text may be the name of a global
    assert described() != before


def test_what_differs_between_processes_alone_is_not_compared() -> None:
    """torch notes the identity of a function on it; code that names numpy's functions can be compared."""

    def noted() -> None:
        numpy.append([], 0)

    noted.wrapper_id = id(noted)  # type: ignore[attr-defined]
    noted.limit = 7  # type: ignore[attr-defined]
    made = Ran()
    made.add(noted.__code__, noted.__globals__)
    found = Content(made.scope())
    found.of("noted", noted)
    found.of("append", numpy.append)
    assert not found.doubts and str(id(noted)) not in str(found.lines)
    assert found.lines["noted.__dict__[limit]"] == "int 7" and "append" in found.lines["append"]
