"""How far the logits drift of a decoder whose cache rounds what it keeps."""

from __future__ import annotations

from torch import Tensor

from attngraph.report.cache_entry import Drift


def drift_between(found: Tensor, wanted: Tensor) -> Drift:
    """How far logits, `[..., V]`, are from those wanted, as distributions over the vocabulary."""
    ours, theirs = (t.detach().flatten(0, -2).double().log_softmax(-1) for t in (found, wanted))
    divergence = (theirs.exp() * (theirs - ours)).nansum(-1).clamp(min=0)  # 0 * (inf - inf) is 0
    same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return Drift(len(ours), float(divergence.mean()), float(divergence.max()), same)
