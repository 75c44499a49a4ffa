"""Runs exported files in a process that cannot import attngraph, nor transformers.

    python -I alone.py CALL FILE...

CALL, written by torch.save, has for a decoder the prompts, the shapes of an empty cache and the number of
new tokens; for an encoder its inputs and the wanted result. Prints one line of JSON for each file: greedy
tokens, or the largest difference. Imports nothing but torch and, for ONNX, onnxruntime.
"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Never:
    """Makes what must not be needed impossible to import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in ("attngraph", "transformers"):
            raise ImportError(f"{name} must not be imported here")


def session(file: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """Runs an ONNX file."""
    found = importlib.import_module("onnxruntime").InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [given.name for given in found.get_inputs()]

    def run(tensors: list[Tensor]) -> list[Tensor]:
        feeds = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
        return [torch.from_numpy(a) for a in found.run(None, feeds)]

    return run


def program(file: str, is_decoder: bool) -> Callable[[list[Tensor]], list[Tensor]]:
    """Runs a pt2 file."""
    module = torch.export.load(file).module()

    def run(tensors: list[Tensor]) -> list[Tensor]:
        if is_decoder:
            ids, lengths, *past = tensors
            logits, present = module(ids, lengths, past)
            return [logits, *present]
        found = module(input_ids=tensors[0], attention_mask=tensors[1])
        return [found] if isinstance(found, Tensor) else list(found)

    return run


def generated(run: Callable[[list[Tensor]], list[Tensor]], call: dict[str, Any]) -> list[list[int]]:
    """Greedy tokens of all rows; the second row begins with padding."""
    ids, lengths = call["ids"], call["lengths"]
    past = [torch.zeros(shape, dtype=dtype) for shape, dtype in call["past"]]
    tokens, found = ids, []
    for _ in range(call["new"]):
        logits, *past = run([tokens, lengths, *past])
        tokens = logits[:, -1:].argmax(-1)
        lengths = lengths + 1
        found.append(tokens)
    rows: list[list[int]] = torch.cat(found, 1).tolist()
    return rows


def main() -> None:
    sys.meta_path.insert(0, Never())  # type: ignore[arg-type]
    torch.set_num_threads(1)
    call = torch.load(sys.argv[1])
    with torch.no_grad():
        for file in sys.argv[2:]:
            is_decoder = "past" in call
            run = session(file) if file.endswith(".onnx") else program(file, is_decoder)
            if is_decoder:
                print(json.dumps(generated(run, call)), flush=True)
                continue
            found = run(call["inputs"])[0]
            real = call["inputs"][1].bool()
            difference = (found - call["wanted"])[real].abs().max() / call["wanted"][real].abs().max()
            print(json.dumps(float(difference)), flush=True)


if __name__ == "__main__":
    main()
