"""DivideCache: ranks divide the tokens of what a decoder keeps, where they would keep the same.

Runs where ranks divide heads. What the heads of several of them share (a latent, key/value heads that are
fewer than ranks) each of them would keep whole. Matches such values that attention alone reads: each rank of
the team that shares them keeps every team-th token, and attention becomes `attngraph::divided_attention`
(`ir/ops/divided_attention.py`), right because attention to parts of the keys is merged by log-sum-exp. The
decoder's proof runs it on all ranks. By "auto" tokens are divided where the bytes of the longest sequence
that a rank then need not keep, in the dtype of the cache, are more than those it sends for a new token. What
is left stays as it is, and the report says why.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import Input, Level, ProgramGraph, computed_from, is_size, op_name, source_of
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Store, in_ring
from attngraph.ir.ops.divided_attention import bytes_exchanged
from attngraph.ir.walk import reached
from attngraph.meaning import Category, category_of
from attngraph.meaning.masks.fold import any_fill, seen
from attngraph.meaning.masks.tiles import sees_itself
from attngraph.meaning.placement.table import differing
from attngraph.passes.build import Refused, infer_anew
from attngraph.pipeline import Outcome
from attngraph.report.ranks import CACHE_EXCHANGE, SentEntry

DIVIDED: dict[type[nodes.Cached], type[nodes.DividedAttention | nodes.DividedLatentAttention]] = {
    nodes.CachedAttention: nodes.DividedAttention, nodes.CachedLatentAttention: nodes.DividedLatentAttention,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DivideCache:
    """`by`: "auto", or "tokens" wherever it can be done. What "auto" counts with: `dtype`, that of cached
    floating values ("": as computed), `most_tokens`, the longest sequence that the cache may hold (None: as
    long as the model allows), and `rollback`, the tokens beside a window that it keeps.

    Raises:
        NoDecoderError: "tokens" was asked for, and nothing can be divided so.
    """

    by: str = "auto"
    dtype: str = ""
    most_tokens: int | None = None
    rollback: int = 0
    name: str = "divide-cache"
    requires: Level = Level.CACHED
    yields: Level = Level.CACHED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        if graph.ranks is None or graph.state is None:
            outcome.notes.append("one device keeps everything")
            return outcome
        found = _Dividing(graph, self).run()
        reasons = graph.ranks.undivided
        if self.by == "tokens" and not found:
            why = next(iter(reasons.values()), "no rank keeps what another keeps")
            raise NoDecoderError(
                f"no rank can keep a part of the tokens: {why}.\n"
                'What to do: leave ShardConfig(cache="tokens") out.'
            )
        if found:
            outcome.notes.append(
                f"the tokens of {len(found)} value(s) are divided among ranks; "
                f"{len(reasons)} stay with every rank that needs them"
            )
        return outcome


def uses_of(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What uses a value otherwise than to move its elements: what is used, the value or what is moved from
    it, and the user."""

    def moved(node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if u.op == "call_function" and category_of(u) is Category.MOVEMENT]

    for used in reached([value], moved):
        others = (u for u in used.users if not is_size(u) and u not in moved(used))
        yield from ((used, user) for user in others)


class _Dividing:
    def __init__(self, graph: ProgramGraph, options: DivideCache) -> None:
        assert graph.ranks is not None and graph.state is not None
        self.graph, self.ranks, self.by = graph, graph.ranks, options.by
        self.dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
        self.rollback = options.rollback
        limits = (graph.state.most_tokens, options.most_tokens)
        self.longest = min((n for n in limits if n is not None), default=None)
        self.axis = graph.ranks.axes[-1]
        self.stores = {store.name: store for store in graph.state.stores}
        self.pages = graph.pages()
        self.names = {node: name for name, node in self.pages.items()}
        self.own = differing(graph)
        self.reasons = graph.ranks.undivided

    def run(self) -> list[str]:
        """Divide what can be; the names of the values."""
        readers, teams = dict[str, list[fx.Node]](), dict[fx.Node, int]()
        for name, store in self.stores.items():
            try:
                readers[name] = self._readers(store)
                for node in readers[name]:
                    teams[node] = self._team(node)
                if len({teams[node] for node in readers[name]}) > 1:
                    raise Refused("several attentions read it that different ranks share")
            except Refused as reason:
                self.reasons[name] = str(reason)
        while self._spread(readers, teams):
            pass
        divided = [name for name in readers if name not in self.reasons]
        self._divide({name: teams[readers[name][0]] for name in divided})
        return divided

    def _spread(self, readers: Mapping[str, Sequence[fx.Node]], teams: Mapping[fx.Node, int]) -> bool:
        """Values that one attention reads are divided together, if that pays; whether another one stays."""
        before = len(self.reasons)
        for name, users in readers.items():
            if name in self.reasons:
                continue
            beside = {other for node in users for other in self._kept_by(node)}
            stays = next((self.reasons[other] for other in beside if other in self.reasons), None)
            if stays is None and self.by == "auto":
                stays = self._does_not_pay(users, teams[users[0]])
            if stays is not None:
                self.reasons[name] = stays
        return len(self.reasons) > before

    # --- what can be divided ---

    def _readers(self, store: Store) -> list[fx.Node]:
        """The attentions that read what is kept."""
        found: dict[fx.Node, None] = {}
        for value, user in uses_of(self.pages[store.name]) if store.name in self.pages else ():
            view = nodes.view(user)
            if not isinstance(view, nodes.Cached) or value in view.reads:
                raise Refused(f"{op_name(user)} at {source_of(user)} reads all that is kept of it")
            found[user] = None
        if not found:
            raise Refused("no attention reads it")
        return list(found)

    def _kept_by(self, node: fx.Node) -> set[str]:
        """The names of the values whose pages an attention reads."""
        view: Any = nodes.view(node)
        pages = [getattr(view, name) for name in view.page_names]
        return {self.names[n] for n in computed_from(pages) if n in self.names}

    def _team(self, node: fx.Node) -> int:
        """How many neighbouring ranks attend to the same keys."""
        view = nodes.view(node)
        assert isinstance(view, nodes.Cached)
        if view.q not in self.own:
            raise Refused("its heads are not divided, and neither is what they attend to")
        if any(read in self.own for read in view.reads):
            raise Refused("scores read what every rank has of its own")
        if view.program.changes_weights:
            raise Refused("scores change weights that are normalised over all keys")
        # The log-sum-exp of keys that a finite fill hides all does not tell how many they are.
        kept = seen(view.program.statements, any_fill)
        if kept is not seen(view.program.statements) and not sees_itself(kept):
            raise Refused("a finite fill may hide all that a query sees")
        if isinstance(view, nodes.CachedLatentAttention):
            return self.axis.count
        heads = [tuple(row) for row in node.meta.get("key_heads", ())]
        team = heads.count(heads[0]) if heads else 1
        same = [heads[n - n % team] for n in range(len(heads))]
        if team == 1 or heads != same or len(set(heads)) * team != len(heads):
            raise Refused("every rank keeps heads of its own")
        if len(heads[0]) > 1:
            raise Refused("ranks share several key/value heads")
        return team

    # --- bytes ---

    def _does_not_pay(self, users: Sequence[fx.Node], team: int) -> str | None:
        """Why the tokens of what these attentions read should stay together; None if they should not."""
        tokens, saved = [0], 0
        for store in {self.stores[name] for node in users for name in self._kept_by(node)}:
            most = [] if self.longest is None else [self.longest]
            most += [] if store.window is None else [in_ring(store.window, self.rollback)]
            if not most:
                return None  # how many tokens of a sequence are kept is not known
            tokens.append(min(most))
            saved += store.bytes_in(self.dtype) * (team - 1) // team * tokens[-1]
        sent = sum(sum(self._sent(node, team)) for node in users)
        if saved > sent:
            return None
        return f"of {max(tokens):,} tokens {saved:,} bytes less are no more than {sent:,} sent for each"

    def _sent(self, node: fx.Node, team: int) -> tuple[int, int]:
        """The bytes of queries and of results that a rank sends for a new token."""
        view: Any = nodes.view(node)
        q = view.q.meta["val"]
        heads, width, value = q.shape[1], q.shape[3], node.meta["val"].shape[3]
        if isinstance(view, nodes.CachedLatentAttention):
            width, value = view.traced_sizes().latent + view.traced_sizes().shared, view.values[1]
        return bytes_exchanged(int(heads), int(width), int(value), q.dtype, team)

    # --- dividing ---

    def _divide(self, teams: Mapping[str, int]) -> None:
        assert self.graph.state is not None
        self.stores |= {n: dataclasses.replace(self.stores[n], team=team) for n, team in teams.items()}
        self._infer_pages(teams)
        sent = []
        for node in self.graph.graph.nodes:
            view = nodes.view(node)
            kept = self._kept_by(node) & teams.keys() if isinstance(view, nodes.Cached) else ()
            if not isinstance(view, nodes.Cached) or not kept:
                continue
            name = next(iter(kept))
            team, table = teams[name], self._table(self.stores[name])
            own = {**vars(view), "table": table, "ranks": self.axis.count, "group": self.axis.group}
            made = DIVIDED[type(view)](**own, team=team)
            size = sum(self._sent(node, team))
            sent.append(SentEntry(CACHE_EXCHANGE, source_of(node), size, size))
            node.target, node.args = made.target, made.args
        self.graph.state = dataclasses.replace(self.graph.state, stores=tuple(self.stores.values()))
        if self.ranks.entry is not None:
            entry = self.ranks.entry
            self.ranks.entry = dataclasses.replace(entry, sent=(*entry.sent, *sent))
        self.graph.clean()
        self.graph.drop_inputs(lambda node, given: given.kind == "rows" and not node.users)

    def _table(self, store: Store) -> fx.Node:
        """The page table of what one rank keeps."""
        given = {told: node for node, told in self.graph.given().items()}
        found = next((node for told, node in given.items() if told.name == store.table), None)
        if found is not None:
            return found
        value, called = given[Input("rows", "first")].meta["val"], f"rows_{store.table.replace('.', '_')}"
        value = self.graph.empty([None, None], value.dtype, value.device)
        return self.graph.add_input(Input("rows", store.table), value, called)

    def _infer_pages(self, teams: Mapping[str, int]) -> None:
        """Values that are divided have pages of another size than those that are not: new symbols for it."""
        page = dict[tuple[int, int | None], Any]()
        for name, team in teams.items():
            store, value = self.stores[name], self.pages[name].meta["val"]
            shape: list[Any] = list(value.shape)
            shape[store.row_dim], shape[store.token_dim] = None, page.get((team, store.window))
            self.pages[name].meta["val"] = self.graph.empty(shape, value.dtype, value.device)
            page[team, store.window] = self.pages[name].meta["val"].shape[store.token_dim]
        infer_anew(self.graph, [self.pages[name] for name in teams])
