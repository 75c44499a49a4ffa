"""The plain decoder equals stock GPT-2 on the same weights, and learns."""

import math

import pytest
import torch
from torch.testing import assert_close

from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.text import byte_batch

SMALL = DecoderLMConfig(layers=2, width=16, heads=4, max_tokens=32)


def test_logits_equal_those_of_transformers_gpt2_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=16, n_layer=2, n_head=4, activation_function="gelu",
        attn_implementation="eager", use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    ours = DecoderLM(SMALL).double().eval()
    weights = {
        "token_embedding.weight": theirs.transformer.wte.weight,
        "position_embedding.weight": theirs.transformer.wpe.weight,
        "norm.weight": theirs.transformer.ln_f.weight,
        "norm.bias": theirs.transformer.ln_f.bias,
        "head.weight": theirs.lm_head.weight,
    }
    for i, block in enumerate(theirs.transformer.h):
        for name, part in {
            "attention_norm": block.ln_1,
            "attention.qkv": block.attn.c_attn,
            "attention.project": block.attn.c_proj,
            "mlp_norm": block.ln_2,
            "mlp.expand": block.mlp.c_fc,
            "mlp.project": block.mlp.c_proj,
        }.items():
            weight = part.weight  # a Conv1D's is [in, out], a norm's is [C]
            weights[f"blocks.{i}.{name}.weight"] = weight.mT if weight.dim() == 2 else weight
            weights[f"blocks.{i}.{name}.bias"] = torch.randn_like(part.bias)
            part.bias.data.copy_(weights[f"blocks.{i}.{name}.bias"])
    ours.load_state_dict(weights)
    ids = byte_batch(2, 11)
    assert_close(ours(ids), theirs(ids).logits)


def test_the_loss_is_the_mean_cross_entropy_of_the_targets() -> None:
    model, window = DecoderLM(SMALL).double(), byte_batch(2, 9)
    ids, targets = window[:, :-1], window[:, 1:].clone()
    targets[0, 0] = -100  # left out
    logits, loss = model(ids, targets)
    assert logits.shape == (2, 8, 256)
    assert loss.shape == ()
    surprises = [
        math.log(math.fsum(math.exp(score) for score in row)) - row[target]
        for row, target in zip(logits.flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True)
        if target != -100
    ]
    assert len(surprises) == 15
    assert loss.item() == pytest.approx(math.fsum(surprises) / 15, rel=1e-12)


def test_a_few_steps_of_training_lower_the_loss() -> None:
    model, window = DecoderLM(SMALL), byte_batch(4, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(20):
        _, loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(256)) < 1.0
    assert losses[-1] < losses[0] / 2


def test_dropout_is_random_in_training_and_absent_in_eval() -> None:
    model, ids = (DecoderLM(DecoderLMConfig(layers=1, width=16, heads=4, dropout=0.5)), byte_batch(1, 8))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
