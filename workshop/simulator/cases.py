"""What `python -m workshop simulate` runs: a kernel's text, a call of it, and mutants that are no faults."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop.simulator.source import load

FOLDER = Path(__file__).parents[2] / "tests" / "codegen" / "simulated"


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes:
        text: of its module. run: of the loaded module and a seed; it complains of wrong results. harmless:
        the mutants that change nothing that could go wrong, by patterns of their names, with the reason.
    """

    name: str
    text: str
    run: Callable[[Any, int], object]
    harmless: Mapping[str, str] = field(default_factory=dict)

    def why_harmless(self, name: str) -> str | None:
        """The reason why a mutant is no fault."""
        return next((why for pattern, why in self.harmless.items() if re.fullmatch(pattern, name)), None)

    def orders(self, count: int, text: str | None = None) -> None:
        """Run it in so many random orders.

        Raises:
            Wrong: it has a fault. AssertionError: its results are wrong.
        """
        module = load(self.text if text is None else text, self.name)
        for seed in range(count):
            self.run(module, seed)


def cases(files: str = "cases*.py") -> list[Case]:
    """Those of the tests: `CASES` of these files."""
    found: list[Case] = []
    for file in sorted(FOLDER.glob(files)):
        spec = importlib.util.spec_from_file_location(f"simulated_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.CASES
    return found
