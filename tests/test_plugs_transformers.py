"""`attn_implementation="attngraph"` in stock transformers models computes what their own eager attention
does, with padding, caches and gradients; derived decoders answer transformers' `generate`."""

from __future__ import annotations

import copy
import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attngraph
from attngraph.ir.ops import nodes
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
CACHE = pytest.importorskip("attngraph.hf").CACHE

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**WIDTHS, "num_key_value_heads": 2}
WINDOWED = {
    **GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    **WIDTHS, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "forced_eos_token_id": None,
}  # fmt: skip
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**WINDOWED, "attn_logit_softcapping": 2.0}),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", WIDTHS),
    "GptOssForCausalLM": ("GptOssConfig", {**WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", LATENT),
}
BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    "T5ForConditionalGeneration": (
        "T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    ),
    "BartForConditionalGeneration": ("BartConfig", BART),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    attngraph.hf.register()
    attngraph.hf.register()


def build(name: str, config: str, settings: dict[str, Any], attention: str = "attngraph") -> Any:
    """A small model with weights that make attention matter."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**TOKENS, **settings}, attn_implementation=attention)
    model = getattr(transformers, name)(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2 if parameter.ndim > 1 else 0.1)
    if hasattr(model, "generation_config"):
        own = model.generation_config
        own.eos_token_id = own.forced_bos_token_id = own.forced_eos_token_id = None
        own.pad_token_id, own.decoder_start_token_id = 0, 1
    return model


def pair(name: str, config: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The same model with attention of ours, and with its own."""
    ours = build(name, config, settings)
    assert ours.config._attn_implementation == "attngraph"
    eager = copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    return ours, eager


def prompts(side: str = "left") -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in ((0, 4), (2, 7)):
        padding = slice(0, count) if side == "left" else slice(-count, None)
        mask[row, padding], ids[row, padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_as_eager(ours: nn.Module, eager: nn.Module, **inputs: Any) -> None:
    """Every answer of the models, also at padding. (The rule of `runtime/verify.py` wants float64, where
    eager attention of most classes is NaN at padding on the left.)"""
    with torch.no_grad():
        found, wanted = ours(**inputs)[0], eager(**inputs)[0]
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


# --- the attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_as_exact_as_those_of_eager_with_padding_on_either_side(name: str) -> None:
    ours, eager = pair(name, *DECODERS[name])
    assert_as_eager(ours, eager, input_ids=prompts()["input_ids"])
    for side in ("left", "right"):
        assert_as_eager(ours, eager, **prompts(side))


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_of_a_padded_batch_are_those_of_eager(name: str) -> None:
    ours, eager = pair(name, *DECODERS[name])
    found, wanted = (
        m.generate(**prompts(), max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
        for m in (ours, eager)
    )
    assert torch.equal(found.sequences, wanted.sequences)
    assert isinstance(found[CACHE], transformers.DynamicCache)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_of_all_weights_are_those_of_eager(name: str, side: str) -> None:
    inputs = prompts(side)
    gradients = []
    for model in pair(name, *DECODERS[name]):
        logits = model(**inputs, use_cache=False).logits
        (logits.pow(2) * inputs["attention_mask"].unsqueeze(-1)).mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    largest = max(float(g.abs().max()) for g in gradients[1])
    assert len(gradients[0]) == len(gradients[1]) > 5
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=5e-6 * largest)


@pytest.mark.parametrize(("name", "config"), [("BertModel", "BertConfig"), ("RobertaModel", "RobertaConfig")])
def test_encoders_with_padding_are_as_exact_as_eager(name: str, config: str) -> None:
    ours, eager = pair(name, config, WIDTHS)
    for side in ("left", "right"):
        assert_as_eager(ours, eager, **prompts(side))


def test_an_image_encoder_is_as_exact_as_eager() -> None:
    settings = {**WIDTHS, "image_size": 16, "patch_size": 4}
    torch.manual_seed(0)
    made = transformers.ViTConfig(**settings, attn_implementation="attngraph")
    ours = transformers.ViTModel(made).eval()
    eager = copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    assert_as_eager(ours, eager, pixel_values=torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize("name", BOTH)
def test_encoder_decoders_answer_as_eager_and_beams_are_the_same(name: str) -> None:
    ours, eager = pair(name, *BOTH[name])
    assert_as_eager(ours, eager, **prompts("right"), decoder_input_ids=prompts()["input_ids"][:, 4:])
    found, wanted = (
        m.generate(**prompts("right"), max_new_tokens=12, do_sample=False, num_beams=2) for m in (ours, eager)
    )
    assert torch.equal(found, wanted)


class _Ops(TorchDispatchMode):
    """The names of all operations, and the score programs of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.programs: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        attention = nodes.called(op, args, kwargs or {})
        if attention is not None:
            self.programs.append(str(attention.program))
        return op(*args, **(kwargs or {}))


def masks_of(model: Any, **inputs: Any) -> list[str]:
    """How the score programs of a call say what is seen."""
    with torch.no_grad(), _Ops() as ops:
        model(**inputs)
    return [line for program in ops.programs for line in program.splitlines() if line.startswith("keep")]


FILL = " else s - 3.4028234663852886e+38"


def test_masks_that_are_formulas_are_given_as_formulas() -> None:
    """So that kernels skip what they hide."""
    mistral = build("MistralForCausalLM", *DECODERS["MistralForCausalLM"])
    bert = build("BertModel", "BertConfig", WIDTHS)
    left, right, ids = prompts("left"), prompts("right"), {"input_ids": prompts()["input_ids"]}
    window = "keep k <= q and k > q - 4"
    assert masks_of(mistral, **ids) == [window] * 2
    assert masks_of(mistral, **right) == [f"{window} and r0[b, k]{FILL}"] * 2
    assert masks_of(mistral, **left) == [f"{window} and r0[b, k]{FILL}"] * 2
    assert masks_of(llama()[0], **ids) == ["keep k <= q"] * 2
    assert masks_of(llama()[0], **right) == ["keep k <= q and r0[b, k]"] * 2
    assert masks_of(llama()[0], **left) == [f"keep k <= q and r0[b, k]{FILL}"] * 2
    assert masks_of(bert, **left) == ["keep r0[b, k]"] * 2
    assert masks_of(bert, **ids) == []


def test_masks_that_are_no_such_formulas_are_read_as_they_are() -> None:
    model, _ = llama()
    ids = prompts()["input_ids"]
    packed = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]).expand(3, -1)
    assert masks_of(model, input_ids=ids, position_ids=packed, use_cache=False) == ["keep r0[b, 0, q, k]"] * 2
    odd = torch.ones(1, 1, 11, 11).tril().bool()
    odd[0, 0, 5, 2] = False
    assert masks_of(model, input_ids=ids, attention_mask=odd) == ["keep r0[0, 0, q, k]"] * 2


def test_a_mask_that_was_changed_has_no_formula_any_more() -> None:
    from attngraph.hf.fused import formula_of, make_mask

    padding = prompts("right")["attention_mask"].bool()
    with torch.inference_mode():
        mask = make_mask(batch_size=3, q_length=11, kv_length=11, q_offset=0, attention_mask=padding)
    assert mask is not None
    assert formula_of(mask, 11, 11) is not None
    assert formula_of(mask, 11, 12) is None
    assert formula_of(mask.clone(), 11, 11) is None
    with torch.inference_mode():
        mask[0, 0, 3, 1] = False
    assert formula_of(mask, 11, 11) is None


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "GptOssForCausalLM"])
def test_a_prompt_in_two_parts_sees_the_same_keys(name: str) -> None:
    """The second part's queries do not begin where its keys do."""
    ours, eager = pair(name, *DECODERS[name])
    inputs = prompts()
    answers = []
    for model in (ours, eager):
        with torch.inference_mode():
            first = model(
                input_ids=inputs["input_ids"][:, :6], attention_mask=inputs["attention_mask"][:, :6]
            )
            answers.append(
                model(
                    input_ids=inputs["input_ids"][:, 6:], attention_mask=inputs["attention_mask"],
                    **{CACHE: first[CACHE]},
                ).logits
            )  # fmt: skip
    torch.testing.assert_close(*answers, rtol=0, atol=2e-6 * float(answers[1].abs().max()))


def test_every_attention_is_one_op_of_ours() -> None:
    model = build("LlamaForCausalLM", *DECODERS["LlamaForCausalLM"])
    with torch.no_grad(), _Ops() as ops:
        model(**prompts())
    assert ops.names.count("attngraph.attention.default") == 2
    assert not any("softmax" in name for name in ops.names)


def llama() -> tuple[Any, Any]:
    return pair("LlamaForCausalLM", *DECODERS["LlamaForCausalLM"])


def test_the_implementation_of_a_model_can_be_changed() -> None:
    ours, eager = llama()
    eager.set_attn_implementation("attngraph")
    assert torch.equal(eager(**prompts()).logits, ours(**prompts()).logits)


def test_a_cache_of_fixed_size_gives_the_tokens_of_eager() -> None:
    found, wanted = (
        m.generate(**prompts(), max_new_tokens=8, do_sample=False, cache_implementation="static")
        for m in llama()
    )
    assert torch.equal(found, wanted)


def test_masks_of_four_dimensions_and_packed_sequences_are_as_in_eager() -> None:
    ours, eager = llama()
    ids = prompts()["input_ids"]
    seen = torch.ones(1, 1, 11, 11).tril().bool()
    seen[0, 0, 5, 2] = False
    added = torch.where(seen, 0.0, torch.finfo().min)
    assert_as_eager(ours, eager, input_ids=ids, attention_mask=added)
    torch.testing.assert_close(
        ours(input_ids=ids, attention_mask=seen).logits, ours(input_ids=ids, attention_mask=added).logits
    )
    places = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]).expand(3, -1)
    assert_as_eager(ours, eager, input_ids=ids, position_ids=places)


def test_a_row_that_sees_no_key_is_as_in_eager_and_its_gradients_are_numbers() -> None:
    gradients = []
    for model in llama():
        hidden = torch.zeros(3, 1, 11, 11, dtype=torch.bool)
        mask = hidden if model.config._attn_implementation == "attngraph" else torch.finfo().min * ~hidden
        x = model.get_input_embeddings()(prompts()["input_ids"]).detach().requires_grad_()
        model(inputs_embeds=x, attention_mask=mask, use_cache=False).logits.pow(2).sum().backward()
        gradients.append(x.grad)
    largest = float(gradients[1].abs().max())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5 * largest)


def test_torch_compile_takes_such_a_model_whole() -> None:
    ours, eager = llama()
    with torch.no_grad():
        found = torch.compile(ours, backend="eager", fullgraph=True)(**prompts(), use_cache=False).logits
        wanted = eager(**prompts()).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_attngraph_compile_recognises_what_such_a_model_computes(name: str) -> None:
    ours, eager = pair(name, *DECODERS[name])
    compiled = attngraph.compile(ours)
    inputs = {**prompts(), "use_cache": False}
    with torch.no_grad():
        found, wanted = compiled(**inputs).logits, eager(**inputs).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))
    assert len(compiled.report.attention) == 2
    assert all("causal" in entry.mask for entry in compiled.report.attention)


def test_a_decoder_can_be_derived_from_such_a_model() -> None:
    ours, eager = llama()
    decoder = attngraph.compile(ours, cache=True)
    tokens = decoder.generate(prompts()["input_ids"], 8, attention_mask=prompts()["attention_mask"])
    assert torch.equal(tokens, eager.generate(**prompts(), max_new_tokens=8, do_sample=False))


def test_an_exported_model_holds_no_op_of_ours_and_answers_the_same() -> None:
    q = torch.randn(2, 4, 5, 8)

    class Attention(nn.Module):
        is_causal = True

        def forward(self, q: Tensor, k: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
            given = {"softcap": 3.0, "position_bias": bias, "s_aux": sinks}
            found: Tensor = attngraph.hf.attention(self, q, k, k, None, **given)[0]
            return found

    inputs = (q, torch.randn(2, 2, 7, 8), torch.randn(1, 4, 5, 7), torch.randn(4))
    exported = torch.export.export(Attention(), inputs).module()
    assert "attngraph" not in exported.code
    torch.testing.assert_close(exported(*inputs), Attention()(*inputs))


def test_under_autocast_the_answer_is_close_to_that_of_eager_under_autocast() -> None:
    ours, eager = llama()
    inputs = prompts("right")
    exact = copy.deepcopy(eager).double()(**inputs).logits
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = ours(**inputs).logits, eager(**inputs).logits
    assert (found - exact).abs().max() <= 2 * (wanted - exact).abs().max()


def test_dropout_follows_the_seed_and_lets_gradients_through() -> None:
    ours = llama()[0].train()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    answers = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        answers.append(ours(**prompts("right")).logits)
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
    answers[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)


def test_weights_of_attention_are_refused_with_a_way_out() -> None:
    ours, _ = llama()
    with pytest.raises(ValueError, match=r"no attention weights.*set_attn_implementation\(\"eager\"\)"):
        ours(**prompts(), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        ours.config.output_attentions = True


def test_what_is_not_understood_is_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="continuous batching"):
        attngraph.hf.attention(nn.Module(), q, q, q, None, cache=object())
    with pytest.raises(ValueError, match=r"found \(1, 3\)"):
        attngraph.hf.attention(nn.Module(), q, q, q, torch.ones(1, 3, dtype=torch.bool))


def test_sinks_of_each_query_join_its_denominator() -> None:
    q, sinks = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 1)
    module = nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    found, _ = attngraph.hf.attention(module, q, q, q, None, sinks=sinks)
    scores = torch.cat([q @ q.mT * 8**-0.5, sinks], -1)
    torch.testing.assert_close(found, (scores.softmax(-1)[..., :-1] @ q).transpose(1, 2))


@pytest.mark.parametrize("found", ["none", "4.57.1"])
def test_a_missing_or_old_transformers_is_said_with_how_to_get_it(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Any = None if found == "none" else types.ModuleType("transformers")
    if other is not None:
        other.__version__ = found
    monkeypatch.delitem(sys.modules, "attngraph.hf")
    monkeypatch.setitem(sys.modules, "transformers", other)
    with pytest.raises(ImportError, match=rf"5.0 or newer, found {found}: pip install"):
        importlib.import_module("attngraph.hf")


# --- decoders in generate ---------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "a penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "no cache": {"do_sample": False, "use_cache": False},
}


@pytest.fixture(scope="module", params=["GPT2LMHeadModel", "MistralForCausalLM", "DeepseekV3ForCausalLM"])
def derived(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A stock model, and its decoder with the face of a model."""
    model = build(request.param, *DECODERS[request.param], attention="eager")
    return model, attngraph.hf.generation_model(attngraph.compile(model, cache=True))


@pytest.mark.parametrize("way", WAYS)
def test_generate_gives_the_tokens_of_transformers(derived: tuple[Any, Any], way: str) -> None:
    answers = []
    for model in derived:
        torch.manual_seed(1)
        answers.append(model.generate(**prompts(), max_new_tokens=16, **WAYS[way]))
    assert torch.equal(*answers)


def test_end_tokens_end_a_row_as_in_transformers(derived: tuple[Any, Any]) -> None:
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": list(range(3, 50))}
    answers = [m.generate(**prompts(), **options) for m in derived]
    assert torch.equal(*answers)
    assert answers[0].shape[1] < 41


def test_generate_goes_on_from_the_state_that_it_returned(derived: tuple[Any, Any]) -> None:
    answers = []
    for model in derived:
        first = model.generate(**prompts(), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, prompts()["input_ids"][:, -2:]], 1)
        mask = torch.cat([prompts()["attention_mask"], torch.ones(3, 8, dtype=torch.int64)], 1)
        given = {"input_ids": ids, "attention_mask": mask, CACHE: first[CACHE]}
        answers.append(model.generate(**given, max_new_tokens=6, do_sample=False))
    assert torch.equal(*answers)


@pytest.mark.parametrize("whole", [True, False], ids=["all tokens", "new tokens alone"])
def test_generate_goes_on_from_a_state_without_padding(derived: tuple[Any, Any], whole: bool) -> None:
    answers = []
    for model in derived:
        first = model.generate(
            torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, return_dict_in_generate=True
        )
        ids = torch.cat([first.sequences, torch.tensor([[7, 5]])], 1)
        given = {"attention_mask": torch.ones_like(ids), CACHE: first[CACHE], "max_new_tokens": 4}
        new = ids if whole else ids[:, first[CACHE].get_seq_length() :]
        answers.append(model.generate(new, **given, do_sample=False)[:, -4:])
    assert torch.equal(*answers)


def test_after_a_prompt_each_new_token_is_computed_alone(
    derived: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = derived
    computed: list[int] = []
    decode = model.decoder.decode

    def counted(ids: torch.Tensor, *rest: Any) -> Any:
        computed.append(ids.shape[1])
        return decode(ids, *rest)

    monkeypatch.setattr(model.decoder, "decode", counted)
    model.generate(**prompts(), max_new_tokens=5, do_sample=False)
    assert computed == [1] * 4


def test_generate_of_a_compiled_model_goes_on_from_its_state() -> None:
    model = build("GPT2LMHeadModel", *DECODERS["GPT2LMHeadModel"], attention="eager")
    compiled = attngraph.compile(copy.deepcopy(model))
    answers = []
    for each in (model, compiled):
        first = each.generate(**prompts(), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        mask = torch.cat([prompts()["attention_mask"], torch.ones(3, 4, dtype=torch.int64)], 1)
        given = {"attention_mask": mask, CACHE: first[CACHE], "max_new_tokens": 4, "do_sample": False}
        answers.append(each.generate(first.sequences, **given))
    assert torch.equal(*answers)


def test_a_plain_model_that_knows_of_no_cache_answers_generate() -> None:
    torch.manual_seed(0)
    plain = DecoderLM(DecoderLMConfig(vocab_size=50, layers=2, width=32, heads=4, max_tokens=64)).eval()
    decoder = attngraph.compile(plain, cache=True)
    model = attngraph.hf.generation_model(decoder, transformers.PreTrainedConfig(pad_token_id=0))
    ids = torch.randint(3, 50, (2, 5))
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), decoder.generate(ids, 12))
    assert attngraph.hf.generation_model(decoder).generate(ids, max_new_tokens=2).shape == (2, 7)


def test_the_model_that_is_wrapped_stays_as_it_was(derived: tuple[Any, Any]) -> None:
    model, wrapped = derived
    assert wrapped.config is not model.config
    assert wrapped.generation_config is not model.generation_config
    assert {id(p) for p in wrapped.parameters()} == {id(p) for p in model.parameters()}


def test_what_is_no_decoder_of_tokens_is_refused() -> None:
    with pytest.raises(TypeError, match=r"attngraph.compile\(model, cache=True\) returns, found Linear"):
        attngraph.hf.generation_model(nn.Linear(2, 2))  # type: ignore[arg-type]


# --- what transformers' models collect by hooks ------------------------------------------------------------


@pytest.mark.parametrize("looked", [False, True], ids=["compiled first", "uncompiled first"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_attentions_and_hidden_states_are_collected_once_a_layer(name: str, looked: bool) -> None:
    model = build(name, *DECODERS[name], attention="eager")
    eager, asked = copy.deepcopy(model), {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        wanted = eager(**prompts("right"), **asked)
        if looked:
            model(**prompts("right"), **asked)
        compiled = attngraph.compile(model)
        for called in (compiled, model, compiled):
            found = called(**prompts("right"), **asked)
            torch.testing.assert_close(found.attentions, wanted.attentions)
            torch.testing.assert_close(found.hidden_states, wanted.hidden_states)
    assert len(wanted.attentions) == len(compiled.report.attention) == 2
    assert not compiled.report.breaks
    counts = [[len(m._forward_hooks) for m in each.modules()] for each in (model, eager)]
    assert counts[0] == counts[1]
    assert sum(counts[1]) > 0
