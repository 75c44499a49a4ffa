"""Our ops as PyTorch has them: what follows from the declaration of each; under differentiation and batching
(forward mode, torch.func, higher orders) right, or refused.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import attngraph
import attngraph.api
from attngraph.ir.ops.kernels import KERNELS

ops = torch.ops.attngraph
SIZES = (3, 7)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = normal(2, 4, 5, 3), normal(2, 2, 5, 3, seed=1), normal(2, 2, 5, 3, seed=2)
TANGENT = normal(2, 4, 5, 3, seed=3)
BIAS = normal(2, 4, 5, 5, seed=4)
PROGRAM = "s = 0.5 * dot + r0[b, h, q, k]; keep k <= q; sink 0.3; p = p * (1 + h)"


def ours(q: Tensor, k: Tensor = K, v: Tensor = V, bias: Tensor = BIAS) -> Tensor:
    return attngraph.attention(q, k, v, PROGRAM, bias)


def eager(q: Tensor, k: Tensor = K, v: Tensor = V, bias: Tensor = BIAS) -> Tensor:
    """The same in plain PyTorch, written apart from the op's own formula."""
    k, v = (t.repeat_interleave(2, -3) for t in (k, v))
    scores = (0.5 * q @ k.mT + bias).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    sink = torch.full_like(scores[..., :1], 0.3)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return weights * torch.arange(1, 5)[:, None, None] @ v


def dual(f: Callable[..., Tensor]) -> Tensor:
    with forward_ad.dual_level():
        found: Tensor = forward_ad.unpack_dual(f(forward_ad.make_dual(Q, TANGENT))).tangent
        return found


def forward_over_backward(f: Callable[..., Tensor], create_graph: bool) -> Tensor:
    with forward_ad.dual_level():
        leaf = Q.clone().requires_grad_()
        value = f(forward_ad.make_dual(leaf, TANGENT)).pow(3).sum()
        (grad,) = torch.autograd.grad(value, leaf, create_graph=create_graph)
        found: Tensor = forward_ad.unpack_dual(grad).tangent
        return found


def tangent_of_the_gradient_alone(f: Callable[..., Tensor]) -> Tensor:
    leaf = Q.clone().requires_grad_()
    value = f(leaf)
    with forward_ad.dual_level():
        (grad,) = torch.autograd.grad(value, leaf, forward_ad.make_dual(value.detach(), TANGENT))
        found: Tensor = forward_ad.unpack_dual(grad).tangent
        return found


def cubed(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: f(*args).pow(3).sum()


def two(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.stack([t, t + 1]) for t in tensors)


def backward_of_each(f: Callable[..., Tensor]) -> Tensor:
    leaf = Q.clone().requires_grad_()
    found = torch.autograd.grad(f(leaf), leaf, torch.stack([Q, TANGENT]), is_grads_batched=True)
    return found[0]


func, functional = torch.func, torch.autograd.functional
TRANSFORMATIONS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "jvp": lambda f: func.jvp(f, (Q,), (TANGENT,))[1],
    "jvp in the bias": lambda f: func.jvp(lambda b: f(Q, K, V, b), (BIAS,), (BIAS.cos(),))[1],
    "jvp of all": lambda f: func.jvp(f, (Q, K, V, BIAS), (TANGENT, V, K, BIAS.cos()))[1],
    "jvp without grad mode": lambda f: torch.no_grad()(lambda: func.jvp(f, (Q,), (TANGENT,))[1])(),
    "dual numbers": dual,
    "linearize": lambda f: func.linearize(f, Q)[1](TANGENT),
    "forward over backward": lambda f: forward_over_backward(f, create_graph=False),
    "forward over backward, recorded": lambda f: forward_over_backward(f, create_graph=True),
    "tangent of the gradient alone": tangent_of_the_gradient_alone,
    "grad": lambda f: func.grad(cubed(f), argnums=(0, 1, 2, 3))(Q, K, V, BIAS),
    "vjp": lambda f: func.vjp(f, Q)[1](TANGENT),
    "jacfwd": lambda f: func.jacfwd(f)(Q),
    "jacrev": lambda f: func.jacrev(f)(Q),
    "hessian": lambda f: func.hessian(cubed(f))(Q),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(cubed(f)))(Q),
    "jvp of jvp": lambda f: func.jvp(lambda q: func.jvp(f, (q,), (TANGENT,))[1], (Q,), (TANGENT,))[1],
    "functional.hvp": lambda f: functional.hvp(cubed(f), Q, TANGENT)[1],
    "functional.jacobian, vectorized": lambda f: functional.jacobian(f, Q, vectorize=True),
    "functional.jacobian, forward": lambda f: functional.jacobian(
        f, Q, vectorize=True, strategy="forward-mode"
    ),
    "a batch of gradients": backward_of_each,
    "vmap": lambda f: func.vmap(f)(*two(Q, K, V, BIAS)),
    "vmap over queries": lambda f: func.vmap(f)(*two(Q)),
    "vmap over queries, bias given": lambda f: func.vmap(f, (1, None, None, None))(
        torch.stack([Q, TANGENT], 1), K, V, BIAS
    ),
    "vmap over the bias": lambda f: func.vmap(f, (None, None, None, 4))(
        Q, K, V, torch.stack([BIAS, -BIAS], 4)
    ),
    "vmap of grad": lambda f: func.vmap(func.grad(cubed(f)))(*two(Q)),
    "grad of vmap": lambda f: func.grad(lambda *a: func.vmap(f)(*a).pow(3).sum())(*two(Q, K, V, BIAS)),
    "jvp of vmap": lambda f: func.jvp(func.vmap(f), two(Q), two(TANGENT))[1],
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_attention_is_transformed_as_its_formula_is(name: str) -> None:
    transformed = TRANSFORMATIONS[name]
    torch.testing.assert_close(transformed(ours), transformed(eager))


@pytest.mark.parametrize("kernel", [name for name in KERNELS if not name.startswith(("triton", "gluon"))])
@pytest.mark.parametrize(
    "name", ["jvp", "jvp of vmap", "dual numbers", "vmap over queries", "hessian", "grad"]
)
def test_a_kernel_that_is_named_is_transformed_as_the_formula_is(kernel: str, name: str) -> None:
    def run(q: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (t.float() for t in (q, K, V))
        return attngraph.attention(q, k, v, "s = 0.5 * dot; keep k <= q", kernel=kernel).double()

    def plain(q: Tensor, *_: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, -3) for t in (K, V))
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return (0.5 * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    transformed = TRANSFORMATIONS[name]
    torch.testing.assert_close(transformed(run), transformed(plain), rtol=1e-4, atol=1e-4)


def is_an_input(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def test_no_op_of_ours_is_a_constant_to_forward_mode() -> None:
    """An op with a kernel and no rule would lose its tangent without a word."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, own = name.partition("::")
        if space != "attngraph" or not any(map(is_an_input, getattr(ops, own).default._schema.arguments)):
            continue
        found = [torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in
                 ("Autograd", "CompositeImplicitAutograd")]  # fmt: skip
        assert any(found), f"{name} has no rule for derivatives"


def test_a_batch_that_the_program_does_not_tell_apart_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = type(KERNELS["reference"]).forward
    monkeypatch.setattr(
        type(KERNELS["reference"]), "forward", lambda self, *a: calls.append(1) or forward(self, *a)
    )

    def run(q: Tensor, bias: Tensor) -> Tensor:
        return attngraph.attention(q, K, V, "s = dot + r0[h]; keep k <= q", bias, kernel="reference")

    queries = torch.stack([Q, TANGENT, -Q])
    each = torch.stack([run(q, BIAS[0, :, 0, 0]) for q in queries])
    assert len(calls) == 3
    torch.testing.assert_close(func.vmap(run, (0, None))(queries, BIAS[0, :, 0, 0]), each)
    assert len(calls) == 4
    torch.testing.assert_close(func.vmap(run)(queries, BIAS[0, :, :3, 0].T)[0], run(Q, BIAS[0, :, 0, 0]))
    assert len(calls) == 8


def test_the_log_sum_exp_has_a_tangent_too() -> None:
    def total(q: Tensor) -> Tensor:
        return (q @ K.repeat_interleave(2, 1).mT).logsumexp(-1)

    found = func.jvp(lambda q: ops.attention(q, K, V, [], [], "")[1], (Q,), (TANGENT,))
    torch.testing.assert_close(found, func.jvp(total, (Q,), (TANGENT,)))


def test_a_row_that_sees_no_key_has_nan_tangents_and_the_others_have_theirs() -> None:
    def run(q: Tensor) -> Tensor:
        return attngraph.attention(q, K, V, "keep k < q")

    def plain(q: Tensor) -> Tensor:
        scores = q @ K.repeat_interleave(2, 1).mT
        hidden = torch.ones(5, 5, dtype=torch.bool).triu()
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ V.repeat_interleave(2, 1)

    found, expected = (func.jvp(f, (Q,), (TANGENT,))[1] for f in (run, plain))
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[:, :, 0].isnan().all()
    assert not found[:, :, 1:].isnan().any()


def test_the_layout_that_callers_rely_on_is_the_same_inside_a_transformation() -> None:
    def joined(q: Tensor) -> Tensor:
        return ours(q).transpose(1, 2).view(2, 5, 12)

    torch.testing.assert_close(func.jvp(joined, (Q,), (TANGENT,))[0], joined(Q))


def test_linear_attention_is_transformed_as_its_formula_is() -> None:
    def run(q: Tensor) -> Tensor:
        return ops.linear_attention(q, K, V, [], [], "keep k <= q")

    def plain(q: Tensor) -> Tensor:
        return (q @ K.repeat_interleave(2, 1).mT).tril() @ V.repeat_interleave(2, 1)

    for transformed in (
        TRANSFORMATIONS[n] for n in ("jvp", "dual numbers", "jacfwd", "hessian", "vmap of grad")
    ):
        torch.testing.assert_close(transformed(run), transformed(plain))


def latent(q: Tensor) -> Tensor:
    up = normal(4, 3, 6, seed=5)
    return ops.latent_attention(q, normal(2, 1, 5, 6, seed=6), up, up, [0, 6], [], [], "keep k <= q")


def backward(q: Tensor) -> Tensor:
    out, lse = ops.attention(Q, K, V, [], [], "")
    return ops.attention_backward(q, torch.zeros_like(lse), out, lse, Q, K, V, [], [], "", "")[0]


def over_a_cache(q: Tensor) -> Tensor:
    rows = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 5]), torch.tensor([0]), torch.tensor([0])
    pages = torch.zeros(1, 2, 8, 3, dtype=q.dtype)
    return ops.cached_attention(q[:1], K[:1], V[:1], pages, pages, [], [], "", *rows)


def history(q: Tensor) -> Tensor:
    rows = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 5]), torch.tensor([0])
    return ops.history(torch.zeros(1, 4, 8, 3, dtype=q.dtype), q[:1], *rows, 2)


def latents_over_a_cache(q: Tensor) -> Tensor:
    rows = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 5]), torch.tensor([0]), torch.tensor([0])
    new, pages, up = normal(1, 1, 5, 6), torch.zeros(1, 1, 8, 6, dtype=q.dtype), normal(4, 3, 6)
    return ops.cached_latent_attention(q[:1], new, pages, up, up, [0, 6], [], [], "", *rows)


@pytest.mark.parametrize("run", [latent, backward, over_a_cache, history, latents_over_a_cache])
def test_an_op_without_derivatives_says_so_wherever_one_is_asked_for(run: Callable[[Tensor], Tensor]) -> None:
    assert torch.isfinite(run(Q)).all()
    with torch.no_grad():
        assert not run(Q.clone().requires_grad_()).requires_grad
    for transformed in (
        lambda f: func.jvp(f, (Q,), (TANGENT,)),
        dual,
        lambda f: torch.no_grad()(dual)(f),
        lambda f: func.grad(cubed(f))(Q),
        lambda f: f(Q.clone().requires_grad_()),
    ):
        with pytest.raises(NotImplementedError, match=r"attngraph::\w+ has no derivatives; \w+"):
            transformed(run)


@pytest.mark.parametrize("form", ["torch.func", "dual numbers"])
def test_forward_mode_inside_of_a_compiled_function_keeps_its_tangent(form: str) -> None:
    def run(q: Tensor) -> Tensor:
        return func.jvp(ours, (q,), (TANGENT,))[1] if form == "torch.func" else dual(ours)

    compiled = torch.compile(run, backend="aot_eager")
    torch.testing.assert_close(compiled(Q), func.jvp(eager, (Q,), (TANGENT,))[1])


def test_a_decoder_refuses_tangents() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 24, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    decoder = attngraph.compile(Model().eval(), cache=True)
    x = normal(1, 6, 8)
    decoder.prefill(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no derivatives"):
        decoder.prefill(forward_ad.make_dual(x, x.cos()))


assert attngraph.api  # registers the ops
SCHEMAS = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] reads, SymInt[] sizes, str program, "
    'str kernel="") -> (Tensor, Tensor)',
    "cached_latent_attention(Tensor q, Tensor latent, Tensor pages, Tensor? key_up, Tensor? value_up, "
    "int[] values, Tensor[] reads, SymInt[] sizes, str program, Tensor table, Tensor starts, Tensor first, "
    'Tensor held, str absorb="auto", str family="", Tensor? scales=None) -> Tensor',
    "running_sum(Tensor? q, Tensor? k, Tensor v, Tensor? decay, Tensor state, Tensor starts, "
    "bool inclusive=True, Tensor? left=None, Tensor? right=None, bool less_one=False, "
    "bool in_order=False) -> (Tensor, Tensor)",
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
