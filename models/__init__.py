"""Attention variants and models in plain PyTorch: inputs for the compiler.

Eager PyTorch only. Attention is spelled out as matmul, scale, mask, softmax, matmul; there is no
cache, no fused op and no `position_ids` argument. Nothing here imports the compiler.

| module | what is in it |
|---|---|
| `attention` | one query, seq2seq, scaled, multi-head (three layouts), cross-attention |
| `masked_attention` | causal (GPT block), boolean masks, padding masks, sliding windows |
| `grouped_attention` | multi-query, and grouped-query in three spellings |
| `windowed_attention` | a sliding window with global tokens; windows with gaps that differ by head |
| `sparse_attention` | the strided and the fixed pattern of the Sparse Transformer |
| `linear_attention` | no softmax: plain products, or positive features with a normaliser |
| `online_softmax` | the recurrence key by key, and flash attention as a loop over key blocks |
| `positions` | sinusoidal, learned, rotary in both layouts |
| `relative_bias` | T5 buckets, ALiBi slopes, the learned 2D table of Swin |
| `decoder_lm` | decoder-only language model: pre-norm, learned positions, GELU |
| `post_norm_decoder` | decoder-only language model: post-norm, sinusoidal positions, ReLU |
| `modern_decoder` | RMSNorm, rotary positions, grouped queries, SwiGLU |
| `mla` | latent attention, with and without decoupled RoPE, and a decoder of it |
| `sparse_transformer` | `decoder_lm` with sparse attention |
| `linear_transformer` | `decoder_lm` with linear attention |
| `encoder` | BERT encoder: post-norm, segments, masked-token head |
| `longformer` | the encoder with windows and global tokens |
| `encoder_decoder` | the original Transformer: self- and cross-attention, sinusoidal positions |
| `rnn_seq2seq` | recurrent encoder and decoder with additive or multiplicative attention |
| `vit` | image classifier: patches, class token, learned positions |
| `sampling` | text from a language model without a cache: top-k, top-p, beams |
| `text` | real bytes to run them on |
| `targets` | `(model, example inputs)` pairs for the command line |

Sizes in the margins: B batch, T tokens, S the tokens of a second sequence (Sq, Skv where both
meet), C model width, H query heads, G key/value heads, D head width of queries and keys, Dv of
values.
"""
