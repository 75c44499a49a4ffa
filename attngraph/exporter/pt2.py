"""torch.export's programs as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from attngraph.exporter.formats import Format, Names, Run, quiet


class PT2(Format):
    """A program that `torch.export.load` reads."""

    name = "pt2"

    def save(self, program: ExportedProgram, path: Path, names: Names) -> None:
        with quiet():
            torch.export.save(program, path)

    def reader(self, path: Path, outputs: Sequence[str]) -> Run:
        with quiet():
            program = torch.export.load(path)
        module, spec = program.module(), program.call_spec.in_spec
        example = pytree.tree_leaves(program.example_inputs, is_leaf=lambda x: x is None)

        def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            given = iter(tensors)
            leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in example]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            with torch.no_grad():
                result: Any = module(*args, **kwargs)
            return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]

        return run

    def guarded(self, tensor: Tensor, holds: Tensor, words: str) -> Tensor:
        torch._assert_async(holds, f"this file is for sizes with {words}")
        return tensor
