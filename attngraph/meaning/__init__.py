"""Facts about a graph: what its values are, found by algebra. Nothing here edits a graph."""

from attngraph.meaning import rules as rules
