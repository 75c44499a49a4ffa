"""A policy that is trained on what it has just sampled, with an importance ratio of exactly 1.

    python examples/same_bits.py --steps 5

The sampler is a decoder: it computes token by token, from a cache, for all rows at once. The trainer computes
whole sequences, with gradients. Of the same weights both have the same logits, bit for bit
(`consistent=True`), so the probability of a sampled token does not depend on who computes it, and nothing has
to correct for that.
"""

import argparse

import torch

import attngraph
from attngraph.models.targets import tiny_decoder_lm

WANTED = ord("e")
"""The byte that is rewarded."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, _ = tiny_decoder_lm(tokens=32)
    policy = attngraph.compile(model, consistent=True)
    sampler = attngraph.compile(model, consistent=True, cache=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    prompt = torch.tensor([list(b"the ")]).expand(options.rows, -1)
    for step in range(options.steps):
        logits, state = sampler.prefill(prompt)
        tokens, old = [prompt], []
        for _ in range(12):
            new = torch.multinomial(logits[:, -1].softmax(-1), 1)
            old.append(attngraph.logprobs(logits[:, -1], new[:, 0]))
            tokens.append(new)
            logits = sampler.decode(new, state)
        ids, sampled = torch.cat(tokens, 1), torch.stack(old, 1)
        whole = policy(ids)[:, prompt.shape[1] - 1 : -1]
        found = attngraph.logprobs(whole, ids[:, prompt.shape[1] :])
        ratio = (found - sampled).exp()
        assert bool((ratio == 1).all()), "a token has another probability for the trainer"
        reward = (ids[:, prompt.shape[1] :] == WANTED).float()
        loss = -(ratio * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: reward {reward.mean():.3f}, ratio {ratio.min():.1f} to {ratio.max():.1f}")


if __name__ == "__main__":
    main()
