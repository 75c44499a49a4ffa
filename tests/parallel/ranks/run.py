"""One of several processes of a test: run with `given`, a task, the rank, the number of ranks, the file where
they meet, and the file for what this one says. The last line of that is its result."""

import copy
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import attngraph
from attngraph.models.mla import MLAConfig, MLADecoder
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig


class Block(nn.Module):
    def __init__(
        self, dropout: float = 0.0, packed: bool = True, kv_heads: int = 4, window: int | None = None
    ) -> None:
        super().__init__()
        self.window = window
        self.sizes = [32, 8 * kv_heads, 8 * kv_heads]
        self.group = 4 // kv_heads
        self.table, self.dropout = nn.Embedding(64, 32), nn.Dropout(dropout)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)
        sizes = [sum(self.sizes)] if packed else self.sizes
        self.qkv = nn.ModuleList(nn.Linear(32, n) for n in sizes)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.norm(x)
        parts = torch.cat([p(y) for p in self.qkv], -1) if len(self.qkv) > 1 else self.qkv[0](y)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in parts.split(self.sizes, -1))
        k, v = (t.repeat_interleave(self.group, 1) for t in (k, v))
        if self.window is None:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            back = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
            y = nn.functional.scaled_dot_product_attention(q, k, v, (back >= 0) & (back < self.window))
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        x = x + self.down(self.up(x).relu())
        return x @ self.table.weight.T


def said_by(call, kind=attngraph.DisagreementError):
    """What a call's error says, in one line."""
    try:
        call()
    except kind as problem:
        return str(problem).replace("\n", " ")
    return "nothing"


def on_axes(*sizes, names=("tensor", "context")):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(mesh, rank, config=None, **sizes):
    """A few steps of training, beside one device."""
    torch.manual_seed(0)
    alone = Block(**sizes)
    model = copy.deepcopy(alone)
    compiled = attngraph.compile(model, mesh=mesh, shard=config)
    adams = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (model, alone)]
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        found = []
        for module, optimiser in ((compiled, adams[0]), (alone, adams[1])):
            logits = module(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            norm = whole(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
            optimiser.step()
            optimiser.zero_grad()
            found.append((loss.detach(), norm))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    for name, wanted in alone.state_dict().items():
        torch.testing.assert_close(whole(model.state_dict()[name]), wanted, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(ids), alone.eval()(ids), rtol=1e-3, atol=1e-4)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return f"held {held} reported {compiled.report.ranks.parameters}"


def train_grouped(mesh, rank):
    """With fewer key/value heads than ranks, and with fewer than query heads in one projection."""
    return train(mesh, rank, packed=False, kv_heads=1) + "; " + train(mesh, rank, kv_heads=2)


def train_whole(mesh, rank):
    return train(mesh, rank, attngraph.ShardConfig(parameters="whole"))


def train_on_both(_, rank):
    """2 x 2 ranks: heads along one axis, tokens along the other; every rank holds its part of the heads."""
    return train(on_axes(2, 2), rank)


def disagree_on_both(_, rank):
    """Of 2 x 2 ranks the last is called otherwise: all say so, those that share no axis with it too."""
    compiled = attngraph.compile(Block(), mesh=on_axes(2, 2))
    return said_by(lambda: compiled(torch.arange(32).view(2, 16) + (rank == 3)))


def checkpoint(mesh, rank):
    """Saved from two ranks, loaded by another model on two ranks, and by one on one device."""
    import torch.distributed.checkpoint as dcp

    folder = f"{MEETING}.checkpoint"
    ids = torch.arange(12).view(2, 6)
    torch.manual_seed(0)
    first = Block(packed=False)
    alone = copy.deepcopy(first)
    attngraph.compile(first, mesh=mesh)(ids)
    dcp.save(first.state_dict(), checkpoint_id=folder)
    torch.manual_seed(1)
    second = Block(packed=False)
    compiled = attngraph.compile(second, mesh=mesh)
    compiled(ids)
    state = second.state_dict()
    dcp.load(state, checkpoint_id=folder)
    second.load_state_dict(state)
    torch.testing.assert_close(compiled(ids), alone(ids))
    return "loaded"


def on_meta(mesh, rank):
    """A model on meta, filled from safetensors and from a checkpoint: a rank has memory for its part."""
    import safetensors.torch
    import torch.distributed.checkpoint as dcp

    folder, ids = MEETING, torch.arange(12).view(2, 6)
    said = []
    for packed in (False, True):
        torch.manual_seed(0)
        alone = Block(packed=packed)
        own = {n: t.contiguous() for n, t in alone.state_dict().items()}
        if rank == 0:
            safetensors.torch.save_file(own, f"{folder}.{packed}.safetensors")
            dcp.save(own, checkpoint_id=f"{folder}.{packed}.checkpoint", no_dist=True)
        dist.barrier()
        for checkpoint in (False, True)[: 1 if packed else 2]:
            with torch.device("meta"):
                model = Block(packed=packed)
            compiled = attngraph.compile(model, mesh=mesh)
            try:
                compiled(ids)
            except attngraph.PlacementError as problem:
                assert "have not been loaded" in str(problem), problem
            compiled.place(ids)
            assert len(compiled._graphs) == 1
            if checkpoint:
                state = model.state_dict()
                dcp.load(state, checkpoint_id=f"{folder}.{packed}.checkpoint")
            else:
                attngraph.load_weights(model, f"{folder}.{packed}.safetensors")
            torch.testing.assert_close(compiled(ids), alone(ids))
            assert len(compiled._graphs) == 1, "the call is the one that was placed"
            stored = sum(p._local_tensor.untyped_storage().size() // 4 for p in model.parameters())
            said.append(f"held {stored} reported {compiled.report.ranks.parameters}")
    with torch.device("meta"):
        model = Block()
        model.register_buffer("table_of_places", torch.arange(4))
    refused = said_by(lambda: attngraph.compile(model, mesh=mesh).place(ids), attngraph.PlacementError)
    assert "buffer table_of_places is on meta" in refused, refused
    file = f"{folder}.False.safetensors"
    said.append(said_by(lambda: attngraph.load_weights(nn.Linear(2, 2), file), attngraph.PlacementError))
    return "; ".join(said)


class Received:
    """While entered, counts the bytes that collectives bring from other ranks."""

    def __init__(self, rank):
        self.bytes, self.rank, self.functional = 0, rank, torch.ops._c10d_functional

    def __enter__(self):
        self.swap, self.gather = self.functional.all_to_all_single, self.functional.all_gather_into_tensor

        def swapped(x, came, went, group):
            found = self.swap(x, came, went, group)
            row = found.element_size() * found.stride(0)
            self.bytes += row * sum(n for r, n in enumerate(came) if r != self.rank)
            return found

        def gathered(x, ranks, group):
            self.bytes += (ranks - 1) * x.numel() * x.element_size()
            return self.gather(x, ranks, group)

        self.functional.all_to_all_single, self.functional.all_gather_into_tensor = swapped, gathered
        return self

    def __exit__(self, *_):
        self.functional.all_to_all_single, self.functional.all_gather_into_tensor = self.swap, self.gather


class Windowed(Block):
    """Attention within a window, beside the causal one."""

    def forward(self, ids, documents=None):
        x = self.table(ids)
        q, k, v = self.qkv[0](x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        i = torch.arange(ids.shape[1])
        seen = (i <= i[:, None]) & (i > i[:, None] - 3)
        if documents is not None:
            seen = (documents[:, None] == documents[..., None])[:, None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return super().forward(ids) + self.out(y.transpose(1, 2).flatten(2)) @ self.table.weight.T


def tokens(_, rank):
    """Tokens divided: values and gradients beside one device, and the bytes that are received."""
    mesh, said = on_axes(2, names=("context",)), []
    for documents in (None, torch.arange(16).div(6, rounding_mode="floor").expand(2, -1)):
        torch.manual_seed(0)
        alone = Windowed()
        model = copy.deepcopy(alone)
        compiled = attngraph.compile(model, mesh=mesh)
        ids = torch.randint(0, 64, (2, 16))
        given = (ids,) if documents is None else (ids, documents)
        compiled(*given)
        with Received(rank) as received:
            found, wanted = compiled(*given), alone(*given)
        said.append(f"{received.bytes} reported {compiled.report.context.received[rank]}")
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        weight = torch.randn_like(wanted)
        found.backward(weight)
        wanted.backward(weight)
        for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
    return "; ".join(said)


def disagree_in_tokens(_, rank):
    compiled = attngraph.compile(Windowed(), mesh=on_axes(2, names=("context",)))
    return said_by(lambda: compiled(torch.arange(32).view(2, 16) + rank))


def disagree(mesh, rank):
    compiled = attngraph.compile(Block(), mesh=mesh)
    ids = torch.arange(12).view(2, 6)
    compiled(ids)
    others = (ids[:, : 4 + rank], ids.float() if rank else ids)
    found = [said_by(lambda other=other: compiled(other)) for other in others]
    compiled(ids)  # and all is well afterwards
    return " | ".join(found)


def disagree_in_code(mesh, rank):
    model = Block()
    if rank:
        model.down = nn.Linear(64, 32, bias=False)
    return said_by(lambda: attngraph.compile(model, mesh=mesh)(torch.arange(12).view(2, 6)))


def disagree_in_numbers(mesh, rank):
    compiled = attngraph.compile(Block(dropout=0.5), mesh=mesh)
    ids = torch.arange(12).view(2, 6)
    torch.manual_seed(0)
    compiled(ids)
    torch.manual_seed(rank)
    return said_by(lambda: compiled(ids))


def decoder_on(mesh, config=None, **sizes):
    torch.manual_seed(0)
    alone = Block(**sizes).eval()
    model = copy.deepcopy(alone)
    return attngraph.compile(model, cache=True, mesh=mesh, shard=config), model, alone


def decode(mesh, rank, config=None):
    """Prefill, decode, greedy, beams, sampling without a seed, an engine; beside one device."""
    ids = torch.randint(0, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    bytes_kept = []
    for sizes in ({"packed": False}, {"kv_heads": 1}):
        decoder, model, alone = decoder_on(mesh, config, **sizes)
        logits, state = decoder.prefill(ids)
        torch.testing.assert_close(logits, alone(ids), rtol=1e-4, atol=1e-5)
        more = decoder.decode(ids[:, :2], state)
        wanted = alone(torch.cat([ids, ids[:, :2]], 1))[:, 5:]
        torch.testing.assert_close(more, wanted, rtol=1e-4, atol=1e-5)
        bytes_kept.append(state.bytes_per_token)
        assert decoder.report.cache.bytes_per_token == state.bytes_per_token
    one = attngraph.compile(alone, cache=True)
    for options in ({}, {"num_beams": 3}, {"temperature": 1.0, "seed": 3}):
        assert torch.equal(decoder.generate(ids, 5, **options), one.generate(ids, 5, **options)), options
    torch.manual_seed(rank)
    drawn = decoder.generate(ids, 12, temperature=2.0)
    told = [torch.empty_like(drawn) for _ in range(2)]
    dist.all_gather(told, drawn)
    assert torch.equal(*told)
    engine = attngraph.Engine(decoder, max_batch=2)
    requests = [engine.submit(ids[n % 2, : 3 + n], 4, temperature=float(n)) for n in range(3)]
    engine.run()
    found = [request.result() for request in requests]
    first = one.generate(ids[:1, :3], 4)[0, 3:].tolist()
    assert found[0] == first, (found, first)
    everyone = [None, None]
    dist.all_gather_object(everyone, found)
    assert everyone[0] == everyone[1]
    held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return f"bytes {bytes_kept} held {held} reported {decoder.report.ranks.parameters}"


def decode_whole(mesh, rank):
    return decode(mesh, rank, attngraph.ShardConfig(parameters="whole"))


def divided(mesh, model, shards, **cache):
    """Rows of other lengths that grow, chunks, another order, greedy tokens: as on one device. The bytes of a
    token that one device keeps, and that this rank does by each of the configs."""
    config = attngraph.CacheConfig(**cache)
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    wanted, said = [], []
    for shard in (None, *shards):
        on = {} if shard is None else {"mesh": mesh, "shard": shard}
        decoder = attngraph.compile(copy.deepcopy(model), cache=config, **on)
        _, state = decoder.prefill([ids[0, :7], ids[1, :1], ids[2, :4]])
        found = [decoder.decode(tokens, state) for tokens in (ids[:, 0], ids[:, :3])]
        state.crop([6, 5, 1])
        state.reorder([2, 0, 1])
        found += [decoder.decode(ids[:, :2], state), decoder.generate(ids, 8)]
        wanted = wanted or found
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        assert state.bytes_per_token == decoder.report.cache.bytes_per_token
        assert shard is None or decoder.report.cache.ranks.tokens, str(decoder.report)
        said.append(state.bytes_per_token)
    return said


def decode_shared(mesh, rank):
    """Four ranks, two to each of two key/value heads."""
    sizes = {"vocab_size": 64, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "hidden": 48}
    torch.manual_seed(0)
    model = ModernDecoder(ModernDecoderConfig(**sizes, layers=1)).eval()
    return divided(mesh, model, [attngraph.ShardConfig(cache=how) for how in ("tokens", "auto")])


def decode_window(mesh, rank):
    """One key/value head and a window: each rank keeps half of the last tokens, and overwrites them."""
    torch.manual_seed(0)
    model = Block(packed=False, kv_heads=1, window=3).eval()
    config = attngraph.CacheConfig(rollback=2)
    on = {"mesh": mesh, "shard": attngraph.ShardConfig(cache="tokens")}
    ids = torch.randint(3, 64, (3, 30), generator=torch.Generator().manual_seed(1))
    both, kept = [], []
    for given in ({}, on):
        decoder = attngraph.compile(copy.deepcopy(model), cache=config, **given)
        _, state = decoder.prefill([ids[0, :9], ids[1, :1], ids[2, :2]])
        found = [decoder.decode(ids[:, n], state) for n in range(9, 16)]
        found.append(decoder.decode(ids[:, 16:21], state))
        state.crop([n - 2 for n in state.lengths])
        found.append(decoder.decode(ids[:, 21], state))
        state.reorder([2, 0, 0])
        found += [decoder.decode(ids[:, 22:24], state), decoder.generate(ids[:, :5], 8)]
        both.append(found)
        kept.append(state.nbytes)
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
    assert decoder.report.cache.ranks.tokens, str(decoder.report)
    return kept


def decode_latent(mesh, rank):
    """Latents, as computed and kept in bfloat16."""
    sizes = {"vocab_size": 64, "width": 32, "heads": 4, "latent": 8, "nope": 8, "rope": 4, "value": 8}
    torch.manual_seed(0)
    model = MLADecoder(MLAConfig(**sizes, query_rank=None, layers=1, hidden=48)).eval()
    shards = [attngraph.ShardConfig(cache="tokens")]
    return [divided(mesh, model, shards, dtype=dtype) for dtype in (None, torch.bfloat16)]


def disagree_in_prompts(mesh, rank):
    """Other prompts, other options, other requests, a state of another rank; and all is well afterwards."""
    decoder, _, _ = decoder_on(mesh)
    ids = torch.arange(10).view(2, 5)
    wanted = decoder.generate(ids, 3)
    _, state = decoder.prefill(ids)
    state.save(f"{MEETING}.state{rank}")
    dist.barrier()
    engine = attngraph.Engine(decoder)
    engine.submit([1, 2, 3 + rank], 3)
    mixed = attngraph.KVCache.load(f"{MEETING}.state0")

    calls = (
        lambda: decoder.prefill(ids + rank),
        lambda: decoder.generate(ids[:, : 4 + rank], 3),
        lambda: decoder.generate(ids, 3, temperature=float(rank)),
        lambda: engine.step(),
        lambda: decoder.decode(ids[:, 0], mixed),
    )
    found = [said_by(call) for call in calls]
    assert torch.equal(decoder.generate(ids, 3), wanted)
    return " | ".join(found)


CALLS = (
    # program, key/value heads, what is read, dimension of queries that is sharded, of the result
    ("s = dot / 3; keep k <= q", 2, None, 1, 1),
    ("s = dot / 3; keep k <= q", 1, None, 1, 1),
    ("s = dot / 3; keep k <= q", 2, None, 0, 0),
    ("s = dot - r0[h] * (q - k)", 2, torch.linspace(0.1, 0.9, 4), 1, 1),
    ("s = dot - r0[h] * (q - k)", 2, torch.linspace(0.1, 0.9, 4), 0, 0),
    ("s = dot - r0[0] * (q - k)", 2, torch.linspace(0.1, 0.9, 4), 1, 1),
    ("s = dot; keep r0[b, q] == r0[b, k]", 2, torch.arange(12).view(2, 6) // 4, 0, 0),
    ("s = dot; keep r0[b, q] == r0[b, k]", 2, torch.arange(12).view(2, 6) // 4, 1, 1),
    ("s = dot - r0[h] * h", 2, torch.linspace(0.1, 0.9, 4), 1, None),
    ("s = dot + r0[h + 1]", 2, torch.linspace(0.1, 0.9, 5), 1, None),
    ("s = dot * (b + 1)", 2, None, 0, None),
)


def dtensor(mesh, rank):
    """Attention of DTensors: results and gradients of one device, divided where that is right."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    generator = torch.Generator().manual_seed(0)
    for program, kv, read, dim, wanted in CALLS:
        q, k, v = (torch.randn(2, n, 6, 8, generator=generator) for n in (4, kv, kv))
        reads = [] if read is None else [read]
        whole = [t.clone().requires_grad_(t.is_floating_point()) for t in (q, k, v, *reads)]
        one = attngraph.attention(*whole[:3], program, *whole[3:])
        weight = torch.randn(one.shape, generator=generator)
        (one * weight).sum().backward()
        mine = []
        for t in (q, k, v, *reads):
            place = Shard(dim) if t.ndim == 4 and t.shape[dim] % 2 == 0 else Replicate()
            mine.append(distribute_tensor(t, mesh, [place]).requires_grad_(t.is_floating_point()))
        found = attngraph.attention(*mine[:3], program, *mine[3:])
        assert found.placements == ((Replicate() if wanted is None else Shard(wanted)),), (program, found)
        torch.testing.assert_close(found.full_tensor(), one, msg=f"{program} {kv} {dim}")
        (found * distribute_tensor(weight, mesh, [Replicate()])).sum().backward()
        for a, b in zip(mine, whole, strict=True):
            if b.grad is not None:
                torch.testing.assert_close(
                    a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-5, msg=f"{program} {kv} {dim}"
                )
    return "equal"


def with_fully_shard(mesh, rank):
    """Refused, whatever holds the parameters; and a model that was compiled before may be compiled again."""
    from torch.distributed.fsdp import fully_shard

    found = []
    data = on_axes(1, 2, names=("data", "tensor"))["data"]
    for config in (None, attngraph.ShardConfig(parameters="whole")):
        model = Block()
        fully_shard(model, mesh=data)
        refused = said_by(
            lambda: attngraph.compile(model, mesh=mesh, shard=config),  # noqa: B023
            attngraph.PlacementError,
        )
        found.append(refused)
    model = Block()
    for _ in range(2):
        attngraph.compile(model, mesh=mesh)(torch.arange(12).view(2, 6))
    return " | ".join(found)


def die(mesh, rank):
    compiled = attngraph.compile(Block(), mesh=mesh)
    ids = torch.arange(12).view(2, 6)
    compiled(ids)
    if rank == 1:
        print("gone", flush=True)
        os._exit(0)
    start = time.time()
    try:
        compiled(ids)
    except Exception as problem:
        return f"{type(problem).__name__} within the time-out: {time.time() - start < 30}"
    return "nothing"


def start(tasks, task, rank, ranks, meeting, said):
    """Run a task of a script in this process, one of `ranks`, with the mesh of all of them."""
    sys.stdout = sys.stderr = said.open("w", buffering=1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=20),
    )  # fmt: skip
    result = tasks[task](init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",)), rank)
    print(result, flush=True)
    # At the exit of Python, gloo in torch 2.14 aborts one process in ten, in scripts without attngraph too.
    os._exit(0)


if __name__ == "__main__":
    MEETING = given[3]  # noqa: F821  (a global that `runpy` was given)
    start(globals(), *given)  # noqa: F821
