"""The scores: how the dot is written, where the scale goes, what is added, what is hidden."""

from __future__ import annotations

from workshop.fuzz.body import Body, aligned, dimension, transposed
from workshop.fuzz.masks import apply_mask, positions, predicate


def scale_operands(body: Body) -> None:
    """The scale applied to q, to k, or its square root to each."""
    scale = body.case.scale
    if scale == "q":
        body.add(f"q = q * {body.size('d')} ** -0.5")
    elif scale == "k":
        body.add(f"k = k / {body.size('d')} ** 0.5")
    elif scale == "both":
        body.add(f"q, k = q * {body.size('d')} ** -0.25, k * {body.size('d')} ** -0.25")


def _lead(body: Body) -> str:
    """The dimensions of a product that are neither contracted nor tokens."""
    return "".join(letter for letter in "nbghr" if letter in body.q)


def multiply(body: Body) -> None:
    """The dot of queries and keys."""
    c, style, lead = body.case, body.case.transpose, _lead(body)
    body.scores = {"transposed": lead + "kq", "einsum_heads_last": "bqhk"}.get(c.dot, lead + "qk")

    def operands(q: str, k: str) -> tuple[str, str]:
        """Both operands with the leading dimensions first, then these letters."""
        return aligned("q", body.q, lead + q, style), aligned("k", body.k, lead + k, style)

    if c.dot in {"bmm", "baddbmm", "baddbmm_empty"}:
        text = _batched(body, *operands("qd", "kd"))
    elif c.dot in {"einsum", "einsum_heads_last"}:
        text = f'torch.einsum("{body.q},{body.k}->{body.scores}", q, k)'
    elif c.dot == "multiply_sum":
        q, k = operands("qd", "kd")
        text = f"({q}.unsqueeze(-2) * {k}.unsqueeze(-3)).sum(-1)"
    elif c.dot == "transposed":
        q, k = operands("dq", "kd")
        text = f"{k} @ {q}"
    else:
        q, k = operands("qd", "dk")
        text = f"{q} @ {k}"
    if c.change == "scores_without_grad":
        body.add("with torch.no_grad():")
        body.add(f"    scores = {text}")
    else:
        body.set_scores(text)


def _batched(body: Body, q: str, k: str) -> str:
    """A batched matrix product with batch and heads flattened into one leading dimension."""
    c, lead = body.case, _lead(body)
    split = ""
    if len(lead) == 2:
        q, k = f"{q}.flatten(0, 1)", f"{k}.flatten(0, 1)"
        split = f".unflatten(0, (-1, {body.size('h')}))"
    product = f"{q}, {transposed(k, c.transpose, 3)}"
    if c.dot == "bmm":
        return f"torch.bmm({product}){split}"
    t, s, d = (body.size(letter) for letter in "qkd")
    maker = "torch.empty" if c.dot == "baddbmm_empty" else "torch.zeros"
    start = f"{maker}({' * '.join(body.size(letter) for letter in lead)}, {t}, {s}, dtype=q.dtype)"
    alpha = f"{d} ** -0.5" if c.scale == "scores_times" else "1.0"
    return f"torch.baddbmm({start}, {product}, beta=0, alpha={alpha}){split}"


def scale_scores(body: Body) -> None:
    """The scale on the scores, as a number or a tensor."""
    c = body.case

    def change(sign: str, by: str) -> None:
        body.add(f"scores {sign}= {by}") if c.in_place else body.set_scores(f"scores {sign} {by}")

    if c.scale == "literal":
        change("*", "0.125")
    elif c.scale == "scores_times" and not c.dot.startswith("baddbmm"):
        change("*", f"{body.size('d')} ** -0.5")
    elif c.scale == "scores_over":
        change("/", f"math.sqrt({body.size('d')})")
    elif c.scale == "tensor":
        body.input("scale", "torch.rand((), generator=g, dtype=torch.float64)")
        change("*", "scale")
    elif c.scale == "per_head":
        change("*", body.per_head("scale", "", ""))


def add_bias(body: Body) -> None:
    """Terms added to the scores, their softcap, and heads mixed before the softmax."""
    c = body.case
    if c.change == "talking_before":
        talk(body, "scores")
    if c.softcap == "before_bias":
        body.set_scores("20.0 * torch.tanh(scores / 20.0)")
    if c.bias != "none":
        bias = _bias(body, c.bias)
        if c.in_place:
            body.add(f"scores += {bias}")
        else:
            body.set_scores(f"scores + {bias}")
    if c.softcap == "after_bias":
        body.set_scores("20.0 * torch.tanh(scores / 20.0)")


def _bias(body: Body, kind: str) -> str:
    """A term to add to the scores, aligned with them."""
    if kind == "dense":
        body.normal("bias", "{T}, {S}")
        return aligned("bias", "qk", body.scores)
    if kind == "dense_per_head":
        return body.per_head("bias", "{T}, {S}", "qk")
    if kind == "on_queries":
        body.normal("bias", "{T}")
        return aligned("bias", "q", body.scores)
    if kind == "relative_keys":
        positions(body)
        body.normal("table", "9, {D}")
        body.add("relative = table[(j[None] - i[:, None]).clamp(-4, 4) + 4]")
        if "n" in body.q and "n" not in body.scores:
            return f'torch.einsum("nqd,qkd->nqk", q, relative).unflatten(0, (-1, {body.case.heads}))'
        return f'torch.einsum("{body.q},qkd->{body.scores}", q, relative)'
    if kind == "alibi":
        positions(body)
        slopes = body.per_head("slopes", "")
        return f"{slopes} * {aligned('(j[None] - i[:, None])', 'qk', body.scores)}"
    if kind == "alibi_by_key":
        positions(body)
        return f"{body.per_head('slopes', '')} * {aligned('j', 'k', body.scores)}"
    body.need("h")
    heads = "{H}" if set("hg") & set(body.scores) else ""
    if kind == "table":
        positions(body)
        body.normal("table", f"{heads}, 9" if heads else "9")
        body.add("bias = table[..., (j[None] - i[:, None]).clamp(-4, 4) + 4]")
        return body.over_heads("bias", "hqk" if heads else "qk")
    body.normal("table", f"8, {heads}" if heads else "8, 1")
    if kind == "table_by_index":
        body.input("index", "torch.randint(0, 8, ({T}, {S}), generator=g)")
        size = body.size("q"), body.size("k")
        body.add(f"bias = table[index.view(-1)].view({size[0]}, {size[1]}, -1).permute(2, 0, 1)")
    else:
        positions(body)
        body.add("behind = (i[:, None] - j[None]).clamp(min=0)")
        body.add("far = 4 + (torch.log(behind.double() / 4) / math.log(4) * 4).long()")
        body.add("bucket = torch.where(behind < 4, behind, far.clamp(max=7))")
        body.add("bias = F.embedding(bucket, table).permute(2, 0, 1)")
    if not heads:
        body.add("bias = bias[0]")
    return body.over_heads("bias", "hqk" if heads else "qk")


def talk(body: Body, name: str) -> None:
    """Mix heads."""
    body.normal("mix", "{H}, {H}")
    mixed = body.scores.replace("h", "x")
    body.add(f'{name} = torch.einsum("{body.scores},hx->{mixed}", {name}, mix)')


def hide(body: Body) -> None:
    """Hide all but the largest scores, then apply the masks."""
    c = body.case
    if c.change == "top_k":
        along = dimension(body.scores, "k")
        body.add(f"top = scores.topk(2, dim={along}).values.amin({along}, keepdim=True)")
        body.set_scores("scores.masked_fill(scores < top, -math.inf)")
    for kind, how, fill, ending in ((c.mask, c.apply, c.fill, ""), (c.mask2, c.apply2, c.fill2, "2")):
        if kind != "none":
            keep, letters = predicate(body, kind, ending)
            apply_mask(body, keep, letters, how, fill, c.in_place, ending)
