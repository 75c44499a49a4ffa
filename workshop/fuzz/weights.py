"""From scores to results: the softmax, what is done to the weights, the values, the output."""

from __future__ import annotations

from workshop.fuzz.body import Body, aligned, dimension
from workshop.fuzz.masks import positions, predicate
from workshop.fuzz.scores import talk


def attend(body: Body) -> list[str]:
    """Softmax, values and output; the names of the results."""
    c = body.case
    if c.weights == "head_mask" or c.softmax in {"sink", "sink_after_values"}:
        body.need("h")
    if c.change == "scores_changed_between":
        along = dimension(body.scores, "k")
        body.add(f"top = scores.detach().amax({along}, keepdim=True)")
        positions(body)
        body.add(f"scores += {aligned('j', 'k', body.scores)}")
        body.set_scores("scores - top")
    _normalise(body)
    results = ["out"]
    _change_weights(body)
    _weigh(body)
    if c.softmax in {"after_values", "sink_after_values"}:
        letters = body.scores.replace("k", "")
        body.add(f"out = out / {aligned('total', letters, body.out)}")
    _lay_out(body)
    if c.change == "weights_returned":
        results.append("p")
    if c.change == "scores_returned":
        results.append("scores")
    if c.change == "scores_changed_after":
        body.add("scores.add_(1)")
        results.append("scores")
    return results


def _normalise(body: Body) -> None:
    """The weights `p` from the scores; for division after the values, `p` and its sum `total`."""
    c = body.case
    letter = {"softmax_over_queries": "q", "softmax_over_heads": "h"}.get(c.change, "k")
    along = dimension(body.scores, letter)
    if c.change == "sigmoid":
        body.add("p = scores.sigmoid()")
        return
    plain = {
        "softmax": f"scores.softmax({along})",
        "function": f"F.softmax(scores, dim={along})",
        "to_float64": f"torch.softmax(scores, dim={along}, dtype=torch.float64).to(v.dtype)",
        "to_float32": f"scores.float().softmax(dim={along}).to(v.dtype)",
        "log_softmax": f"F.log_softmax(scores, dim={along}).exp()",
        "logsumexp": f"torch.exp(scores - torch.logsumexp(scores, {along}, keepdim=True))",
    }
    total = f"e.sum({along}, keepdim=True)"
    exponentials = {
        "stable": f"(scores - scores.amax({along}, keepdim=True)).exp()",
        "stable_max": f"torch.exp(scores - torch.max(scores, dim={along}, keepdim=True)[0])",
        "exp": "scores.exp()",
        "exp2": "torch.exp2(scores / math.log(2))",
        "plus_one": "scores.exp()",
    }
    if c.softmax in plain:
        body.add(f"p = {plain[c.softmax]}")
    elif c.softmax in exponentials:
        body.add(f"e = {exponentials[c.softmax]}")
        body.add(f"p = e / (1 + {total})" if c.softmax == "plus_one" else f"p = e / {total}")
    elif c.softmax in {"after_values", "sink_after_values"}:
        body.add("p = scores.exp()")
        body.add(f"total = p.sum({along})")
        if c.softmax == "sink_after_values":
            body.per_head("sink", "")
            rows = body.scores.replace("k", "")
            sink = body.over_heads("sink", "h" if set("hg") & set(rows) else "", rows)
            body.add(f"total = total + {sink}.exp()")
    else:
        # one more score in each row, whose weight is dropped
        if c.softmax == "sink":
            sink = body.per_head("sink", "")
            body.add(f"column = {sink}.expand_as(scores.narrow({along}, 0, 1))")
        else:
            body.add(f"column = torch.zeros_like(scores.narrow({along}, 0, 1))")
        body.add(f"p = torch.cat([scores, column], {along}).softmax({along})")
        body.add(f"p = p.narrow({along}, 0, scores.shape[{along}])")


def _change_weights(body: Body) -> None:
    c = body.case
    along = dimension(body.scores, "k")
    if c.weights == "nan_to_num":
        body.add("p = p.nan_to_num(0.0)")
    elif c.weights in {"masked", "masked_fill"}:
        keep, letters = predicate(body, "causal_positions", "_after")
        full = aligned(keep, letters, body.scores)
        body.add(f"p = p * {full}" if c.weights == "masked" else f"p = p.masked_fill(~{full}, 0.0)")
    elif c.weights == "head_mask":
        body.add(f"p = p * {body.per_head('head_mask', '')}")
    elif c.weights == "no_dropout":
        body.add("p = F.dropout(p, p=0.0)")
    elif c.weights == "eval_dropout":
        body.add("p = F.dropout(p, p=0.1, training=False)")
    if c.change == "talking_after":
        talk(body, "p")
    elif c.change == "renormalised":
        keep, letters = predicate(body, "causal_positions", "_again")
        body.add(f"p = p * {aligned(keep, letters, body.scores)}")
        body.add(f"p = p / p.sum({along}, keepdim=True)")
    elif c.change == "squared":
        body.add("p = p * p")
        body.add(f"p = p / p.sum({along}, keepdim=True)")
    elif c.change == "double_softmax":
        body.add(f"p = p.softmax({along})")
    elif c.change == "weights_transposed":
        order = [body.scores.index({"q": "k", "k": "q"}.get(letter, letter)) for letter in body.scores]
        body.add(f"p = p.permute({', '.join(map(str, order))})")
    elif c.change == "weights_changed_in_place":
        keep, letters = predicate(body, "causal_positions", "_again")
        body.add("p = p * 1.0")
        body.add(f"p.mul_(2.0).masked_fill_(~{aligned(keep, letters, body.scores)}, 0.5)")
    elif c.change == "weights_detached":
        body.add("p = p.detach()")


def _weigh(body: Body) -> None:
    """The values summed with the weights."""
    c, style = body.case, body.case.transpose
    if "n" in body.v and "n" not in body.scores:
        order = aligned("p", body.scores, "bhqk")
        body.add(f"p = {order}.flatten(0, 1)")
        p_letters = "nqk"
    else:
        p_letters = body.scores
    lead = "".join(letter for letter in "nbghr" if letter in p_letters)
    p = aligned("p", p_letters, lead + "qk", style)
    body.out = lead + "qe"
    v_letters = body.v
    if c.change == "weights_used_twice":
        body.add(f"v = v + {aligned('k', body.k.replace('d', 'e'), body.v)}")
    if c.values in {"einsum", "einsum_tokens_first"}:
        body.out = "bqhe" if c.values == "einsum_tokens_first" else body.out
        text = f'torch.einsum("{p_letters},{v_letters}->{body.out}", p, v)'
    elif c.values == "bmm":
        v = aligned("v", v_letters, lead + "ke", style)
        text = f"torch.bmm({p}, {v})"
        if len(lead) == 2:
            text = f"torch.bmm({p}.flatten(0, 1), {v}.flatten(0, 1)).unflatten(0, (-1, {body.size('h')}))"
    elif c.values == "multiply_sum":
        text = f"({p}.unsqueeze(-1) * {aligned('v', v_letters, lead + 'ke', style)}.unsqueeze(-3)).sum(-2)"
    elif c.values == "transposed":
        body.out = lead + "eq"
        turned = aligned("p", p_letters, lead + "kq", style)
        text = f"{aligned('v', v_letters, lead + 'ek', style)} @ {turned}"
    else:
        text = f"{p} @ {aligned('v', v_letters, lead + 'ke', style)}"
    body.add(f"out = {text}")
    if c.softmax in {"after_values", "sink_after_values"} and "n" in body.out and "n" not in body.scores:
        body.add(f"out = out.unflatten(0, (-1, {c.heads}))")
        body.out = body.out.replace("n", "bh")


def _lay_out(body: Body) -> None:
    """The output in the layout of the case: unchanged, tokens before heads, or heads joined."""
    output = body.case.output
    if output == "same":
        return
    if "n" in body.out:
        body.add(f"out = out.unflatten(0, (-1, {body.case.heads}))")
        body.out = body.out.replace("n", "bh")
    heads = "".join(letter for letter in "ghr" if letter in body.out)
    out = aligned("out", body.out, "bq" + heads + "e")
    if out != "out":
        body.add(f"out = {out}")
    if output == "joined" and heads:
        body.add("out = out.flatten(2)")
