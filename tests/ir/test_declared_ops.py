"""Ops of ours as PyTorch has them: what follows from the declaration of each."""

import pytest
import torch

import attngraph.api

assert attngraph.api  # registers the ops
SCHEMAS = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] reads, SymInt[] sizes, str program, "
    'str kernel="") -> (Tensor, Tensor)',
    "cached_latent_attention(Tensor q, Tensor latent, Tensor pages, Tensor? key_up, Tensor? value_up, "
    "int[] values, Tensor[] reads, SymInt[] sizes, str program, Tensor table, Tensor starts, Tensor first, "
    'Tensor held, str absorb="auto", str family="", Tensor? scales=None) -> Tensor',
    "running_sum(Tensor? q, Tensor? k, Tensor v, Tensor? decay, Tensor state, Tensor starts, "
    "bool inclusive=True, Tensor? left=None, Tensor? right=None, bool less_one=False) -> (Tensor, Tensor)",
    "fetch_keys(Tensor x, Tensor[] reads, SymInt[] sizes, str program, int[] chunks, int ranks, str group) "
    "-> Tensor",
    "strided_scatter(Tensor x, Tensor src, SymInt[] size, SymInt[] stride, SymInt storage_offset) -> Tensor",
    "laid_out(Tensor(a) x, int[] order) -> Tensor(a)",
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda text: text.partition("(")[0])
def test_the_schema_of_an_op_is_the_signature_of_its_function(schema: str) -> None:
    op = getattr(torch.ops.attngraph, schema.partition("(")[0]).default
    assert str(op._schema) == f"attngraph::{schema}"


def test_every_op_has_a_rule_for_autograd_or_consists_of_operations_that_have_theirs() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("attngraph::")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    without = [
        n for n in names if not any(has_kernel(n, k) for k in ("Autograd", "CompositeImplicitAutograd"))
    ]
    assert without == ["attngraph::seed"]  # no operand, so no derivative
