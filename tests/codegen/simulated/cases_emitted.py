"""attngraph's own kernels, with the calls and harmless mutants that `test_gluon_orders.py` has of them."""

import dataclasses
import importlib
import sys
from pathlib import Path
from unittest import mock

from attngraph.codegen.triton import attempts, visits

sys.path[:0] = [str(Path(__file__).parents[1])]  # for the tests, and what they share
tests = importlib.import_module("test_gluon_orders")


def as_in_tests(case):
    """Where a kernel does not run, no other is tried; lists are made for small calls too."""

    def run(module, seed):
        once = mock.patch.object(attempts, "once", lambda plan, device, call: (call(plan), ""))
        with once, mock.patch.object(visits, "WORTH", 1):
            case.run(module, seed)

    return dataclasses.replace(case, run=run)


def made(name, is_forward):
    with mock.patch.object(visits, "WORTH", 1):
        case = tests.case_of(name, is_forward)
    kind = "forward" if is_forward else "gradients"
    return as_in_tests(dataclasses.replace(case, name=f"gluon.forward, {kind}: {name}"))


CASES = [made(*each) for each in tests.MUTATED]
