"""The encoder-decoder equals torch's own Transformer layers, and looks only where it may."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.text import byte_batch

SMALL = EncoderDecoderConfig(layers=2, width=16, heads=4, hidden=32, max_tokens=32)


def give_weights(source: Any, target: nn.Module) -> None:
    """Copy one of our attentions, feed-forwards or norms into torch's layer part."""
    with torch.no_grad():
        if isinstance(target, nn.MultiheadAttention):
            inputs = [source.query, source.key, source.value]
            target.in_proj_weight.copy_(torch.cat([part.weight for part in inputs]))
            target.in_proj_bias.copy_(torch.cat([part.bias for part in inputs]))
            target.out_proj.load_state_dict(source.project.state_dict())
        else:
            target.load_state_dict(source.state_dict())


def torch_encoder_layer(block: Any) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    give_weights(block.attention.attention, layer.self_attn)
    give_weights(block.attention_norm, layer.norm1)
    give_weights(block.feed_forward.expand, layer.linear1)
    give_weights(block.feed_forward.project, layer.linear2)
    give_weights(block.feed_forward_norm, layer.norm2)
    return layer


def torch_decoder_layer(block: Any) -> nn.TransformerDecoderLayer:
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    give_weights(block.self_attention.attention, layer.self_attn)
    give_weights(block.self_norm, layer.norm1)
    give_weights(block.cross_attention, layer.multihead_attn)
    give_weights(block.cross_norm, layer.norm2)
    give_weights(block.feed_forward.expand, layer.linear1)
    give_weights(block.feed_forward.project, layer.linear2)
    give_weights(block.feed_forward_norm, layer.norm3)
    return layer


def randomised() -> EncoderDecoder:
    """A model in which norms and biases are not left at ones and zeros."""
    model = EncoderDecoder(SMALL).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def padding_after(*lengths: int, tokens: int) -> Tensor:
    return torch.arange(tokens) >= torch.tensor(lengths)[:, None]


def test_logits_equal_those_of_torch_transformer_layers_with_the_same_weights() -> None:
    model = randomised()
    source, target = byte_batch(2, 9), byte_batch(2, 7, seed=1)
    source_padding = padding_after(9, 6, tokens=9)
    target_padding = padding_after(5, 7, tokens=7)

    memory = model.source_embedding(source)
    for block in model.encoder:
        memory = torch_encoder_layer(block)(memory, src_key_padding_mask=source_padding)
    y = model.target_embedding(target)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for block in model.decoder:
        y = torch_decoder_layer(block)(
            y,
            memory,
            tgt_mask=future,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding,
        )
    expected = y @ model.head.weight.T
    assert_close(model(source, target, source_padding, target_padding), expected)


def test_every_logit_depends_on_real_source_tokens_and_on_no_padding() -> None:
    model = randomised()
    source, target = byte_batch(1, 9), byte_batch(1, 8, seed=1)
    padding = padding_after(6, tokens=9)
    before = model(source, target, padding)
    in_padding, in_text = source.clone(), source.clone()
    in_padding[:, 7] = (source[:, 7] + 1) % 256
    in_text[:, 2] = (source[:, 2] + 1) % 256
    assert_close(model(in_padding, target, padding), before, rtol=0, atol=0)
    assert (model(in_text, target, padding) != before).any(dim=-1).all()
