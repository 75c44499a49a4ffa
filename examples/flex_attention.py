"""An attention from FlexAttention's functions, and a model's own attention as such functions.

python examples/flex_attention.py
"""

import torch

import attngraph

q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))

# --- in: functions as FlexAttention takes them
slopes = torch.rand(4, requires_grad=True)
documents = torch.arange(64).expand(2, 64) // 20


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def within_documents(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (documents[b, q_idx] == documents[b, kv_idx])


out = attngraph.attention(q, k, v, score_mod=alibi, mask_mod=within_documents)
out.sum().backward()
print("gradients of the slopes:", slopes.grad)


# --- out: what a model computes, as such functions and as a call of SDPA
def window(q, k, v):
    places = torch.arange(q.shape[2])
    seen = (places <= places[:, None]) & (places > places[:, None] - 16)
    return (q @ k.mT / 32**0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ v


(attention,) = attngraph.explain(window, q, k, v).attention
print(attention.flex())
print(attention.sdpa())
