"""What the tests of code generation share: caches of their own, golden tables, a quick C compiler, and the
layouts in which operands may lie."""

import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu import call, compiled, toolchain
from attngraph.codegen.triton import device, launch, store, tuned
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.functions import FUNCTIONS, Operation
from workshop.bench.scorecard.ahead_of_time import Usage

sys.path[:0] = [str(Path(__file__).parent)]  # for `known_good`
FLAGS = toolchain.FLAGS
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = [] if IS_INTERPRETED else ["interpreted"]  # by `test_interpreted.py`
if device.no_triton() is not None:
    collect_ignore.append("test_simulator.py")  # whose kernels have Triton's layouts and dtypes
if IS_INTERPRETED:
    from .interpreter import mend

    mend()


@pytest.fixture(autouse=IS_INTERPRETED, scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is interpreted is stored apart from what is compiled."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    store.directory.cache_clear()


@pytest.fixture(autouse=IS_INTERPRETED, scope="session")
def known_good_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels whose sources were interpreted are not interpreted again (`known_good.py`)."""
    from known_good import of_this_run

    with of_this_run(request.config.getoption("update_golden")):
        yield


@pytest.fixture(autouse=True)
def ours_in_16_bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu.compiled` is tested, also where ATen's kernel is faster; `test_cpu_chosen.py` tests the choice."""
    if not request.module.__name__.endswith("test_cpu_chosen"):
        monkeypatch.setattr(compiled.Compiled, "_faster", lambda self, step, flash, ours, given: ours(*given))


@pytest.fixture
def check_usage(
    golden: Callable[..., None], request: pytest.FixtureRequest
) -> Callable[[str, str, Blocks, Usage], None]:
    """Compares what a compiled kernel uses with a line of a golden table, whose figures hold for the Triton
    that it names."""

    def check(table: str, line: str, blocks: Blocks, usage: Usage) -> None:
        version = importlib.metadata.version("triton")
        known = json.loads((request.path.parent / "golden" / table).read_text())
        if known["triton"] == version or request.config.getoption("update_golden"):
            found = {"blocks": str(blocks), **dataclasses.asdict(usage)}
            kernels = dict(sorted({**known["kernels"], line: found}.items()))
            golden(table, json.dumps({"triton": version, "kernels": kernels}, indent=1) + "\n")

    return check


@pytest.fixture
def softsign(monkeypatch: pytest.MonkeyPatch) -> str:
    """A function that the language does not have, added as what it takes: one row."""
    row = Operation(
        "softsign", 1, torch.nn.functional.softsign, "reals", "float", "rising",
        ("1.0 / ((1.0 + abs(x)) * (1.0 + abs(x)))",),
        "({0} / (1.0f + fabsf({0})))", "({0} / (1.0 + tl.abs({0})))",
    )  # fmt: skip
    monkeypatch.setitem(FUNCTIONS, row.name, row)
    return row.name


# --- Triton ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def triton_compiler() -> None:
    """For tests that compile for GPUs that are not here."""
    if IS_INTERPRETED or device.no_triton() is not None:
        pytest.skip("needs triton as a compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Caches of this test's own, ours and triton's; where ours holds emitted kernels and tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))
    caches = (store.directory, launch.load, tuned.measured)
    for kept in caches:
        kept.cache_clear()
    yield tmp_path / "attngraph" / "triton"
    for kept in caches:
        kept.cache_clear()


# --- C ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def libraries(shared_folder: Path) -> Path:
    """Where the libraries of this run lie: a program's C is compiled once for all tests."""
    try:
        toolchain.compiler()
    except toolchain.CompilerError as error:
        pytest.skip(str(error))
    return shared_folder / "libraries"


@pytest.fixture
def compiled_at_any_size(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of any size are compiled; random programs are not kept among the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(libraries))
    monkeypatch.setattr(compiled, "WORTH", 1)


@pytest.fixture
def optimised(compiled_at_any_size: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code as users have it; what other tests compiled quickly is not used."""
    monkeypatch.setattr(toolchain, "FLAGS", FLAGS)
    monkeypatch.setattr(call, "_libraries", {})
    toolchain._identity.cache_clear()
    yield
    toolchain._identity.cache_clear()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is left to other kernels is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("the call was not served by the library")

    monkeypatch.setattr(compiled.Compiled, "_otherwise", refuse)


# --- operands ---------------------------------------------------------------------------------------------

Operands = tuple[Tensor, Tensor, Tensor]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded batch": lambda t: t[:1].expand(2, -1, -1, -1),
    "expanded heads": lambda t: t[:, :1].expand(-1, 2, -1, -1),
    "token-major": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "reversed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "slice": lambda t: torch.stack([t, -t], -1)[..., 0],
    "offset": lambda t: torch.cat([t[..., :3], t], -1)[..., 3:],
    "expanded width": lambda t: t[..., :1].expand(t.shape),
}


@pytest.fixture(params=LAYOUTS)
def lay_out(request: pytest.FixtureRequest) -> Callable[[Operands], Operands]:
    """q, k and v, or those of them of which this makes sense, laid out in memory in one of several ways."""
    name = request.param
    change = LAYOUTS[name]

    def lay(given: Operands) -> Operands:
        q, k, v = given
        match name:
            case "expanded batch" | "expanded heads":
                return q, change(k), change(v)
            case "expanded width":
                return change(q), k, v
        return change(q), change(k), change(v)

    return lay
