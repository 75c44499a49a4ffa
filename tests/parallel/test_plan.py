"""A plan's figures are those that simulated runs report; its estimates follow from them by its formulas."""

import functools
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.api.plan import H100, Planner, plan
from attngraph.api.plan_memory import WithoutMemory, fill
from attngraph.cli import main
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.models.targets import tiny_decoder_lm
from attngraph.report.plan import Machine, Plan, Share, Way
from attngraph.report.ranks import CACHE_EXCHANGE

TINY = "attngraph.models.targets:tiny_decoder_lm"
TOKENS = 32


def _lm() -> nn.Module:
    torch.manual_seed(0)
    return DecoderLM(DecoderLMConfig(width=32, heads=4, layers=1)).eval()


def _grouped() -> nn.Module:
    """Two key/value heads: fewer than the ranks of the largest group."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": 32, "heads": 4, "kv_heads": 2, "layers": 1, "hidden": 48}
    return ModernDecoder(ModernDecoderConfig(**sizes)).eval()


def _ids(rows: int = 2) -> Tensor:
    return torch.randint(0, 256, (rows, TOKENS))


def _shares(found: Plan) -> dict[str, Share]:
    return {way.name: way.share for way in found.ways if way.share is not None}


@functools.cache
def _on_two() -> Plan:
    return plan(_lm(), (_ids(),), 2)


@pytest.fixture(scope="module", params=[_lm, _grouped], ids=["heads", "grouped"])
def planned(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Share]]:
    """A model, and what a rank has in each way to run it on four."""
    model = request.param()
    return model, _shares(plan(model, (_ids(),), 4))


def _simulated(model: nn.Module, **ranks: int) -> Any:
    """The report of a call on simulated ranks."""
    compiled = attngraph.compile(model, mesh=attngraph.SimulatedMesh(**ranks))
    with torch.no_grad():
        compiled(_ids())
    return compiled.report


def test_ranks_hold_and_send_what_simulated_ones_report(planned: tuple[nn.Module, dict[str, Share]]) -> None:
    model, shares = planned
    names = ["data 4", "tensor 2", "tensor 4", "context 2", "context 4", "tensor 2 x context 2"]
    assert list(shares) == names and shares["context 2"].cache is None
    number = _ids().numel()
    for count in (2, 4):
        share, ranks = shares[f"tensor {count}"], _simulated(model, tensor=count).ranks
        assert share.weights == 4 * ranks.parameters[1] < shares["data 4"].weights
        assert share.sent == share.received == ranks.sent_per_token > 0
        share, tokens = shares[f"context {count}"], _simulated(model, context=count).context
        assert share.weights == shares["data 4"].weights
        assert share.received == max(tokens.received) / number > 0
        sent = [sum(f.back[r] or f.bytes[r] for f in tokens.fetched) for r in range(count)]
        assert sum(sent) == sum(tokens.received) and share.sent == max(sent) / number
    share, report = shares["tensor 2 x context 2"], _simulated(model, tensor=2, context=2)
    assert share.weights == 4 * report.ranks.parameters[1] == shares["tensor 2"].weights
    # A rank sends for its own tokens, which are half of them, what it would send for all.
    assert share.received == report.ranks.sent_per_token / 2 + max(report.context.received) / number


@pytest.mark.parametrize(("name", "count"), [("tensor 4", 4), ("data 4", None), ("tensor 2", 2)])
def test_what_a_rank_keeps_and_sends_for_a_new_token_is_that_of_a_simulated_decoder(
    planned: tuple[nn.Module, dict[str, Share]], name: str, count: int | None
) -> None:
    model, shares = planned
    decoder = attngraph.compile(
        model, cache=attngraph.CacheConfig(proof=False),
        mesh=None if count is None else attngraph.SimulatedMesh(tensor=count),
    )  # fmt: skip
    decoder.prefill(_ids())
    assert decoder.report.cache is not None
    assert shares[name].cache == decoder.report.cache.bytes_per_token
    ranks = decoder.report.ranks
    assert shares[name].sent_new == (0 if ranks is None else ranks.sent_per_token)
    whats = {entry.what for entry in ([] if ranks is None else ranks.sent)}
    assert (CACHE_EXCHANGE in whats) == (isinstance(model, ModernDecoder) and count == 4)


@functools.cache
def _steps(of: Callable[[], nn.Module]) -> dict[str, Share]:
    return _shares(plan(of(), (_ids(),), 2, training=True))


@pytest.mark.parametrize("of", [_lm, _grouped])
def test_what_a_backward_pass_keeps_is_what_autograd_saves(of: Callable[[], nn.Module]) -> None:
    """To the byte: the storages that the compiled model's call saves, weights and the input left out."""
    model, ids, saved = of(), _ids(), dict[int, Tensor]()
    compiled = attngraph.compile(model, min_scores=0)
    compiled(ids)

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compiled(ids)
    for tensor in (*model.parameters(), *model.buffers(), ids):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    assert _steps(of)["data 2"].kept == sum(t.untyped_storage().nbytes() for t in saved.values()) > 0


def test_ranks_keep_less_than_one_device_and_fetched_keys_of_all_tokens() -> None:
    shares = _steps(_lm)
    whole = shares["data 2"].kept
    keys = 2 * 2 * TOKENS * 32 * 4  # keys and values, rows, tokens, width, bytes
    assert shares["data 2"].fetched == shares["tensor 2"].fetched == 0
    assert shares["context 2"].fetched == keys
    assert whole / 2 < shares["tensor 2"].kept < whole
    # Queries are a part of one packed projection, which stays beside the keys of all tokens.
    assert shares["context 2"].kept == pytest.approx(whole / 2 + keys, rel=0.01)
    assert all(share.cache is None for share in shares.values())


def test_the_estimate_of_a_step_is_what_the_stated_formulas_give() -> None:
    share = Share(100, 5, None, 0, 30, 15, 0, 1, "", 7, 40)
    found = Plan(4, 10, 20, Machine(100, 50, 10, 445), (), (), True)
    bound = found.estimate(Way("tensor", 2, 2, share))
    assert bound is not None and bound.memory == 4 * 100 + 5 + 40 and bound.fits
    assert bound.token == pytest.approx(3 * 100 / 20 / 50 + (2 * 30 + 2 * 100 * 1 / 2 / 20) / 10)
    assert bound.new_token is None and bound.throughput == 2 / bound.token
    alone = found.estimate(Way("context", 4, 1, share))
    assert alone is not None and alone.token == pytest.approx(0.3 + (2 * 30 + 2 * 100 * 3 / 4 / 20) / 10)
    both = found.estimate(Way("both", 4, 1, share, tokens=2))
    assert both is not None and both.token == bound.token


@pytest.mark.slow
def test_the_command_plans_steps_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", TINY, "--tokens", "32", "--ranks", "2", "--memory", "80GB", "--training"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "activations" in out and "AdamW's state" in out and "a new token" not in out
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["training"] and told["ways"][0]["share"]["kept"] > told["ways"][1]["share"]["kept"] > 0


@pytest.mark.slow
def test_operations_are_those_of_products_and_of_pairs_that_the_mask_leaves() -> None:
    shares = _shares(_on_two())
    heads, width, hidden, rows = 4, 32, 128, 256
    projections = 2 * (4 * width * width + 2 * width * hidden + width * rows)
    pairs = TOKENS * (TOKENS + 1) / 2
    attention = 2 * heads * pairs * 2 * (width // heads) / TOKENS
    assert shares["data 2"].flops == pytest.approx(projections + attention)
    assert shares["tensor 2"].flops == pytest.approx((projections + attention) / 2)
    assert shares["context 2"].flops == pytest.approx((projections + attention) / 2)


class Scores(nn.Module):
    """Attention of three heads, which two ranks cannot divide, and nothing else."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_what_cannot_be_divided_is_not_derived_and_says_why() -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 8)
    found = plan(Scores(), (q, k, v), 4)
    reasons = {way.name: way.reason for way in found.ways if way.share is None}
    assert set(reasons) == {"tensor 2", "tensor 4", "context 2", "context 4", "tensor 2 x context 2"}
    assert reasons["context 2"] == "7 tokens cannot be divided equally among 2 ranks"
    assert "nothing is divided among 2" in reasons["tensor 2"]
    assert "ids [B, T] are the only input" in str(found)
    assert "tensor 4: not derived" in str(found)


@pytest.mark.slow
def test_thousands_of_ranks_are_groups_of_those_that_are_derived() -> None:
    found = plan(_lm(), (_ids(),), 4096, group=2)
    ways = {way.name: way for way in found.ways}
    assert ways["tensor 2"].groups == 2048 and ways["tensor 2"].share is not None
    assert ways["tensor 4"].share is None and "more than 2 ranks" in ways["tensor 4"].reason
    assert ways["tensor 4096"].groups == 1 and len(ways) == 1 + 2 * 12


@pytest.mark.slow
def test_what_is_too_large_to_be_proved_is_derived_by_the_rules_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proved = _on_two()
    assert "by the rules alone" not in str(proved)
    monkeypatch.setattr("attngraph.api.plan.PROOF_BYTES", 0)
    trusted = plan(_lm(), (_ids(),), 2)
    assert trusted.ways == proved.ways and "by the rules alone" in str(trusted)


@pytest.mark.slow
def test_large_groups_are_derived_without_simulating_their_ranks() -> None:
    with torch.no_grad():
        share = Planner(_lm(), (_ids(),), lambda stage: None, decodes=False).share
        assert share(1, 16).received > share(1, 8).received
        assert share(4, 4).weights == share(4, 1).weights


def _way(axis: str, ranks: int, groups: int, weights: int, sent: float, flops: float) -> Way:
    return Way(axis, ranks, groups, Share(weights, 5, 2, 1, sent, sent / 2, 2 * int(sent), flops, ""))


def test_the_estimate_is_what_the_stated_formulas_give() -> None:
    found = Plan(2, 10, 20, Machine(100, 50, 10, 130), ())
    bound = found.estimate(_way("tensor", 2, 1, 100, 30, 1))
    assert bound is not None and bound.memory == 100 + 5 + 2 * 10 + 1 and bound.fits
    assert bound.token == pytest.approx(100 / 20 / 50 + 30 / 10)
    assert bound.new_token == pytest.approx((100 + 21) / 50 + 60 / 10)
    computing = found.estimate(_way("data", 1, 2, 110, 0, 1000))
    assert computing is not None and not computing.fits
    assert computing.token == computing.new_token == 10 and computing.throughput == 2 / 10


def test_the_chosen_way_fits_with_the_most_tokens_a_second() -> None:
    ways = (
        _way("data", 1, 4, 1000, 0, 100), _way("tensor", 2, 2, 500, 10, 50), _way("tensor", 4, 1, 250, 15, 25)
    )  # fmt: skip
    for memory, name in ((2000, "data 4"), (600, "tensor 2"), (300, "tensor 4")):
        found = Plan(4, 10, 1000, Machine(100, 1e6, 100, memory), ways)
        assert found.chosen is not None and found.chosen.name == name
    none = Plan(4, 10, 1000, Machine(100, 1e6, 100, 200), ways)
    assert none.chosen is None and "the least that a rank needs is 276 B" in str(none)


@pytest.mark.slow
def test_the_command_prints_the_plan_of_the_function(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Plan] = []
    monkeypatch.setattr("attngraph.cli.plan.plan", lambda *given: found.append(plan(*given)) or found[-1])
    command = ["plan", TINY, "--tokens", "32", "--ranks", "2", "--memory", "80GB"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(found[0].to_json())
    assert (found[0].ranks, found[0].tokens) == (2, 32)
    assert told["machine"]["flops"] == H100.flops and told["chosen"] == "data 2"
    small = ["--memory", "600kB", "--link", "1GB/s", "--flops", "1T", "--bandwidth", "1GiB/s"]
    assert main([*command[:-2], *small]) == 1
    out = capsys.readouterr().out
    assert "chosen: none: no way fits into 600 kB" in out and "link 1 GB a second" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0", "--memory", "1GB"], "--ranks: must be a whole number of at least 1, found '0'"),
        (["--ranks", "2", "--memory", "much"], "--memory: must be a positive number"),
        (["--ranks", "2", "--memory", "-1GB"], "--memory: expected one argument"),
        (["--ranks", "2", "--memory", "0"], "--memory: must be a positive number"),
        (["--ranks", "2", "--memory", "8iB"], "--memory: must be a positive number"),
        (["--ranks", "2"], "the following arguments are required: --memory"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", TINY, *arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_target_that_cannot_be_used_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "attngraph.models.targets:none", "--ranks", "2", "--memory", "1GB"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith("attngraph: attngraph.models.targets has no 'none'")
    assert main(["plan", f"{__name__}:without_attention", "--ranks", "2", "--memory", "1GB"]) == 2
    assert "no attention was found in the model" in capsys.readouterr().err.splitlines()[-1]


def without_attention() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Linear(4, 4), (torch.ones(2, 4),)


def test_weights_take_no_memory_and_what_is_computed_while_building_keeps_its_contents() -> None:
    with WithoutMemory():
        model, inputs = tiny_decoder_lm(tokens=32)
        model.register_buffer("mask", torch.ones(4, 4).tril())
        model.head.weight = model.token_embedding.weight  # type: ignore[union-attr]
    assert all(p.is_meta for p in model.parameters() if p.ndim > 1)
    assert fill(model, inputs)
    assert all(p.is_contiguous() and not p.any() for p in model.parameters() if p.ndim > 1)
    assert model.head.weight is model.token_embedding.weight  # type: ignore[union-attr]
    assert torch.equal(model.mask, torch.ones(4, 4).tril())  # type: ignore[arg-type]
    with WithoutMemory():
        model.mask = torch.empty(4, 4)
    assert not fill(model, inputs)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the memory of a process as Linux does")
def test_weights_that_are_larger_than_the_memory_take_none() -> None:
    """Three parameters of 256 GB each."""
    with WithoutMemory():
        model = nn.ParameterList(torch.empty(1 << 8, 1 << 14, 1 << 14) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert fill(model, ())
    assert [p.stride() for p in model] == [(1 << 28, 1 << 14, 1)] * 3 and model[2][-1, -1, -1] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


@pytest.mark.skipif(
    torch.__version__ < (2, 14), reason="torch holds parts of packed projections from version 2.14 on"
)
def test_the_table_in_the_docs_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(attngraph.__file__).resolve().parent.parent / "docs" / "many-devices.md"
    _, _, shown = page.read_text("utf-8").partition("$ attngraph plan ")
    command, _, rest = shown.partition("\n")
    assert main(["plan", *command.split()]) == 0
    assert capsys.readouterr().out.startswith(rest.partition("```")[0].rstrip() + "\n\nassumed:")
