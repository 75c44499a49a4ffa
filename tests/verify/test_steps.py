"""`attngraph.verify` of decoders: every split of a prompt, rows alone, and transformers' own cache."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph


class Causal(nn.Module):
    """A language model of one attention with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.places = nn.Embedding(20, 16), nn.Embedding(200, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 20)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        n = ids.shape[1]
        x = self.ids(ids) + self.places(torch.arange(n))
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None] != 0)
        return self.out((q @ k.mT / 4).masked_fill(~seen, -1e9).softmax(-1) @ v)


class ByHand:
    """A decoder that runs the model again for each token; `fault` changes the tokens that it goes on from."""

    def __init__(self, model: nn.Module, fault: Any = lambda ids: ids) -> None:
        self.model, self.fault = model, fault

    def prefill(self, ids: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self.model(ids, **inputs), {"ids": ids}

    def decode(self, ids: Tensor, state: dict[str, Tensor], **inputs: Any) -> Tensor:
        state["ids"] = self.fault(torch.cat([state["ids"], ids], 1))
        found: Tensor = self.model(state["ids"])
        return found[:, -1:]


IDS = torch.randint(0, 20, (2, 6))


def test_the_steps_of_a_derived_decoder_are_those_of_the_whole_model() -> None:
    model = Causal().eval()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    decoder = attngraph.compile(model, cache=True)
    decoder.prefill(IDS)
    verdict = attngraph.verify(model, decoder, {"ids": IDS, "attention_mask": mask}, budget=2)
    assert verdict and verdict.tried, str(verdict)
    assert "the candidate's steps are compared with whole sequences" in str(verdict)
    assert [a.program == b.program for a, b in verdict.attentions] == [True]


def test_a_step_that_is_wrong_for_some_splits_is_told_with_its_split() -> None:
    model = Causal().eval()
    assert attngraph.verify(model, ByHand(model), (IDS,), budget=5)
    assert "by number alone: it has steps alone" in str(
        attngraph.verify(model, ByHand(model), (IDS,), budget=0)
    )
    forgets = ByHand(model, lambda ids: ids[:, -4:])
    verdict = attngraph.verify(model, forgets, (IDS,), budget=10)
    assert verdict.status == "differs", str(verdict)
    assert "1 token(s) prefilled and the others decoded one by one" in verdict.differences[0].about
    assert verdict.differences[0].smallest == ("int64 [1, 5]",)


def test_rows_that_mix_are_noticed() -> None:
    class Mixes(ByHand):
        def prefill(self, ids: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
            logits, state = super().prefill(ids)
            return logits * (1.0 if len(ids) > 1 else 1.01), state

    verdict = attngraph.verify(Causal().eval(), Mixes(Causal().eval()), (IDS,), budget=5)
    assert verdict.status == "differs" and "of row 0 alone" in verdict.differences[0].about


def test_a_cache_that_rounds_is_told_apart_from_a_fault() -> None:
    model = Causal().eval()
    decoder = attngraph.compile(model, cache=attngraph.CacheConfig(dtype=torch.int8))
    verdict = attngraph.verify(model, decoder, (IDS,))
    assert verdict.status == "cannot be compared" and verdict.differences[0].code == "cache-rounds"


@pytest.fixture(scope="module")
def roberta() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40, is_decoder=True, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.RobertaForCausalLM(config).eval()


def test_where_steps_of_transformers_leave_the_whole_model_is_named(roberta: Any) -> None:
    from attngraph.hf import stepwise

    ids = torch.randint(3, 30, (2, 6))
    verdict = attngraph.verify(roberta, stepwise(roberta), {"input_ids": ids}, budget=5)
    assert verdict.status == "differs", str(verdict)
    difference = verdict.differences[0]
    assert difference.enters == "roberta.embeddings.position_embeddings" and difference.given == "0"
    assert "it is given other values as argument 0" in str(difference)
    assert difference.smallest == ("int64 [1, 1]",) and roberta.generation_config.eos_token_id == 2


def test_steps_of_transformers_that_are_right_are_equal() -> None:
    transformers = pytest.importorskip("transformers")
    from attngraph.hf import stepwise

    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 30, (2, 6))
    for hidden in (0, 2):  # tokens at the beginning of a row
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["attention_mask"][0, :hidden] = 0
        verdict = attngraph.verify(model, stepwise(model), inputs, budget=0)
        assert verdict and verdict.tried == 1, str(verdict)
    hidden = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    verdict = attngraph.verify(model, stepwise(model), hidden, budget=0)
    assert verdict.status == "cannot be compared" and "rows of hidden tokens alone" in str(verdict)
    with pytest.raises(TypeError, match="a model of transformers that generates"):
        stepwise(Causal())  # type: ignore[arg-type]


def test_a_copy_of_a_decoder_that_was_used_has_weights_of_its_own() -> None:
    decoder = attngraph.compile(Causal().eval(), cache=True)
    wanted, _ = decoder.prefill(IDS)
    other = copy.deepcopy(decoder)
    with torch.no_grad():
        other.out.bias.add_(1.0)
    torch.testing.assert_close(other.prefill(IDS)[0], wanted + 1.0)
    torch.testing.assert_close(decoder.prefill(IDS)[0], wanted)


def test_a_saved_decoder_has_its_own_weights(tmp_path: Path) -> None:
    model = Causal().eval()
    decoder = attngraph.compile(model, cache=True)
    decoder.prefill(IDS)
    decoder.save(tmp_path / "saved", weights=True)
    assert attngraph.verify(model, tmp_path / "saved", (IDS,), budget=0)
    with torch.no_grad():
        model.out.bias.add_(0.1)
    assert attngraph.verify(model, tmp_path / "saved", (IDS,), budget=0).status == "differs"


def test_a_decoder_that_cannot_be_derived_is_no_difference() -> None:
    later = nn.Sequential(nn.Embedding(20, 16), nn.Softmax(1)).eval()
    verdict = attngraph.verify(later, attngraph.compile(later, cache=True), (IDS,), budget=0)
    assert verdict.status == "cannot be compared" and verdict.differences[0].code == "candidate-refuses"
    assert "sees" in str(verdict) or "later" in str(verdict), str(verdict)


def test_a_decoder_of_what_cannot_be_captured_is_no_difference() -> None:
    class Sorted(Causal):
        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = super().forward(ids)
            return found * float(found.detach().numpy().max() < 1e9)

    model = Sorted().eval()
    verdict = attngraph.verify(model, attngraph.compile(model, cache=True), (IDS,), budget=0)
    assert verdict.status == "cannot be compared" and verdict.differences[0].code == "candidate-refuses"
