"""The attention family, each member written plainly: the inputs of the compiler.

Eager PyTorch only. Attention is spelled out as matmul, scale, mask, softmax, matmul; there is no
cache, no fused op and no `position_ids` argument. Nothing here imports the compiler.

| module | what is in it |
|---|---|
| `attention` | one query, seq2seq, scaled, multi-head (three layouts), cross-attention |
| `masked_attention` | causal (GPT block), boolean masks, padding masks, sliding windows |
| `grouped_attention` | multi-query, and grouped-query in three spellings |
| `decoder_lm` | decoder-only language model: pre-norm, learned positions, GELU |
| `encoder` | BERT encoder: post-norm, segments, masked-token head |
| `encoder_decoder` | the original Transformer: self- and cross-attention, sinusoidal positions |
| `modern_decoder` | RMSNorm, rotary positions, grouped queries, SwiGLU |
| `text` | real bytes to run them on |
| `targets` | `(model, example inputs)` pairs for the command line |

Sizes in the margins: B batch, T tokens, S the tokens of a second sequence (Sq, Skv where both
meet), C model width, H query heads, G key/value heads, D head width of queries and keys, Dv of
values.
"""
