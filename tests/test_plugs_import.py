"""Importing attngraph loads nothing; its names are there all the same, and `compile` is the function."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attngraph

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in a Python of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_importing_attngraph_and_its_plugin_loads_no_torch() -> None:
    done = run("import sys, attngraph, attngraph.pytest_plugin; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


ORDERS = (
    "import attngraph.api.compile; import attngraph",
    "from attngraph import compile; import attngraph.api.compile",
    "import attngraph.cli, importlib; importlib.import_module('attngraph.api.compile')",
)
NAMES = "import attngraph; attngraph.parse; from attngraph.ir.ops.kernels import KERNELS; print(*KERNELS)"


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each of these prints in a process that has imported torch, and nothing of attngraph."""
    compile_is = "print(type(attngraph.compile).__name__, attngraph.compile.__module__)"
    codes = [*(f"{code}; {compile_is}" for code in ORDERS), f"{NAMES}; torch.ops.attngraph.cached_attention"]
    done = run(f"""
import os, sys, torch, torch.export, torch._dynamo
for code in {codes!r}:
    assert "attngraph" not in sys.modules
    if (child := os.fork()) == 0:
        exec(code)
        print("", end="", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
""")
    assert done.returncode == 0, done.stderr
    return dict(zip((*ORDERS, NAMES), done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("code", ORDERS)
def test_compile_is_the_function_in_whatever_order_things_are_imported(
    code: str, said: dict[str, str]
) -> None:
    assert said[code] == "function attngraph.api.compile"


def test_the_first_use_of_any_name_registers_ops_and_kernels(said: dict[str, str]) -> None:
    names = said[NAMES].split()
    assert {"cpu.flash", "cpu.tiled"} <= set(names)
    assert names[-1] == "reference"


def test_every_name_of_the_stub_is_public_and_there() -> None:
    tree = ast.parse((ROOT / "attngraph" / "__init__.pyi").read_text(encoding="utf-8"))
    declared = {a.asname: a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert declared.keys() == {*attngraph.__all__, *attngraph._MODULES} <= set(dir(attngraph))
    for name in attngraph.__all__:
        assert declared[name] == getattr(attngraph, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'attngraph' has no attribute 'compil'"):
        attngraph.compil  # noqa: B018
    assert not hasattr(attngraph, "nonsense")


@pytest.mark.slow
def test_the_first_use_may_be_inside_torch_compile() -> None:
    code = """
import torch, attngraph

@torch.compile(backend="eager", fullgraph=True)
def attend(q):
    return attngraph.attention(q, q, q, "keep k <= q")

print(attend(torch.randn(1, 2, 5, 8)).shape)
"""
    done = run(code)
    assert done.stdout == "torch.Size([1, 2, 5, 8])\n", done.stderr
