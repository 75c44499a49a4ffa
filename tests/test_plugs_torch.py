"""attngraph as torch's own tools see it: a backend of torch.compile with options, a name in TORCH_LOGS,
artifacts in TORCH_TRACE."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attngraph.api.torch_backend import dynamo_backend
from attngraph.passes import DEFAULT_PIPELINE

ROOT = Path(__file__).resolve().parent.parent
ATTEND = """
import torch, attngraph

def attend(q):
    return (q @ q.transpose(-1, -2)).softmax(-1) @ q

attngraph.compile(attend)(torch.randn(2, 4, 8, 8))
"""


def attend(q: Tensor) -> Tensor:
    return (q @ q.transpose(-1, -2)).softmax(-1) @ q


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "TORCH_TRACE")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**kept, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def compiled_with(**options: object) -> Tensor:
    torch._dynamo.reset()
    q = torch.randn(2, 4, 8, 8)
    found: Tensor = torch.compile(attend, backend=dynamo_backend, options=options)(q)
    torch.testing.assert_close(found, attend(q))
    return found


def test_torch_compile_takes_options(tmp_path: Path) -> None:
    compiled_with(backend="reference", dump=str(tmp_path), absorb="never", inductor=False)
    (text,) = tmp_path.glob("graph-0/*-select-kernels.txt")
    assert "kernel=reference" in text.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"inductr": True},
            r"no option 'inductr'; did you mean 'inductor'\? Accepted are backend: one of auto",
        ),
        (
            {"banana": 1},
            r"no option 'banana'; there are backend, .*Accepted are .*dump: a directory; .*absorb: ",
        ),
        ({"inductor": "yes"}, "option 'inductor' must be True or False, found 'yes'"),
        (
            {"backend": "cuda"},
            "backend must be one of auto, cpu, triton, gluon, gluon_unordered, reference, found 'cuda'",
        ),
        ({"backend": 3}, "option 'backend' must be one of auto, cpu"),
        ({"absorb": "maybe"}, "absorb must be one of .*'maybe'"),
        ({"strict": True}, "no option 'strict'.*fullgraph=True"),
        ({"cache": True}, r"no option 'cache'.*attngraph.compile\(model, cache=True\)"),
    ],
)
def test_an_option_that_makes_no_sense_is_named_with_what_is_accepted(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        compiled_with(**options)


@pytest.mark.slow
def test_torch_logs_know_attngraph_and_a_plain_run_prints_nothing() -> None:
    loud = run(ATTEND, TORCH_LOGS="+attngraph").stderr
    assert re.search(r"^V.*attngraph/pipeline.py:\d+\] fuse-attention: fused 1", loud, re.MULTILINE)
    assert len(re.findall(r"\] fuse-attention: \d+ -> \d+ ops", loud)) == 1
    some = run(ATTEND, TORCH_LOGS="attngraph").stderr
    assert "] fuse-attention: " in some
    assert not re.search(r"^V", some, re.MULTILINE)
    quiet = run(ATTEND)
    assert (quiet.stdout, quiet.stderr) == ("", "")


@pytest.mark.slow
def test_torch_trace_has_an_artifact_of_every_pass(tmp_path: Path) -> None:
    run(ATTEND, TORCH_TRACE=str(tmp_path))
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    names = re.findall(r'"artifact": \{"name": "attngraph_([\w-]+)"', text)
    assert names == [step.name for step in DEFAULT_PIPELINE] and "fuse-attention" in names
    after = text[text.index("attngraph_fuse-attention") :]
    assert "= attention(" in after[: after.index("attngraph_merge-heads")]
