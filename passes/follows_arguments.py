"""Which values of a graph are computed from arguments of the call, not from weights and constants alone."""

from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph, is_size
from attngraph.ir.walk import filled


class FollowsArguments:
    """Answers for one graph. What is known of a value is kept while its nodes stay."""

    def __init__(self, graph: ProgramGraph) -> None:
        self.graph = graph
        self._known: dict[fx.Node, bool] = {}

    def __call__(self, value: fx.Node) -> bool:
        """Whether a value is computed from arguments. Sizes are not followed."""
        known = self._known
        if not known:
            known |= {node: given.kind == "argument" for node, given in self.graph.given().items()}

        def operands(node: fx.Node) -> list[fx.Node]:
            return [] if is_size(node) else node.all_input_nodes

        return filled(known, value, operands, lambda node: any(known[n] for n in operands(node)))

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Another value takes the place of one. Where the answer for it is another one, all is asked anew."""
        if old in self._known and self(new) != self._known[old]:
            self._known.clear()
