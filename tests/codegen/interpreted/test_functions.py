"""A function added as one row (`softsign` in tests/codegen/conftest.py), run by Triton's interpreter."""

import torch
from frames import REFERENCE, SMALL, agree, operands

from attngraph.ir.language.parser import parse


def test_a_new_row_runs_forwards_and_backwards(softsign: str) -> None:
    text, given = f"s = 3 * {softsign}(dot / 2); keep k <= q", operands()
    results = agree(text, given, needed=True)
    grads = torch.randn_like(results[0]), torch.randn_like(results[1])
    found, wanted = (k.backward(parse(text), given, (), (), results, grads) for k in (SMALL, REFERENCE))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
