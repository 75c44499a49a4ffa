"""The process of a candidate of `attngraph.verify(..., subprocess=True)`.

It is run as `python -m attngraph.cli.worker NAME FOLDER MEMORY`. Once it writes a byte to standard
output it waits for questions: a byte on standard input is one in FOLDER/question, and the next on standard
output an answer in FOLDER/answer.
"""

import copy
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attngraph.api  # noqa: F401  before the limit
from attngraph.cli.target import load_side
from attngraph.cli.terminal import told
from attngraph.runtime.verify import results_of


def main(name: str, folder: Path, memory: int) -> None:
    questions, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in range(3):  # what the candidate prints is no answer
        os.dup2(nothing, own)
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (taken + memory,) * 2)  # what can be written, not what is mapped
    resource.setrlimit(resource.RLIMIT_FSIZE, (memory,) * 2)
    sides: dict[bool, Any] = {}
    os.write(answers, b"!")
    while os.read(questions, 1):
        try:
            if not sides:
                side = load_side(name)[0]
                sides[False] = side.eval() if isinstance(side, nn.Module) else side
            answer = _answer(torch.load(folder / "question", weights_only=True), sides)
        except (Exception, SystemExit) as problem:
            answer = {"failed": told(problem)}
        torch.save({"failed": "", **answer}, folder / "answer")
        os.write(answers, b"!")


def _answer(question: dict[str, Any], sides: dict[bool, Any]) -> dict[str, Any]:
    side = sides[False]
    if question["ask"] == "weights":
        is_module = isinstance(side, nn.Module)
        weights = {n: t.detach() for n, t in side.state_dict().items()} if is_module else {}
        trained = [n for n, _ in side.named_parameters(remove_duplicate=False)] if is_module else []
        return {"weights": weights, "trained": trained}
    weights = question["weights"]
    if weights:
        given, own = ({t.dtype for t in of.values()} for of in (weights, side.state_dict()))
        wide = torch.float64 in given - own
        if wide not in sides:
            sides[wide] = copy.deepcopy(side).double()
        side = sides[wide]
        side.load_state_dict(weights)
    with torch.no_grad():
        results = results_of(side(*question["args"], **question["kwargs"]))
    return {"results": [t.contiguous() for t in results]}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
