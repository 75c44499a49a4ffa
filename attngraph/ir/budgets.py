"""Budgets: how far the compiler looks before it gives up, what each number bounds, and what happens past it.

None of them decides whether an answer is right. Past a budget something is left as the model has it, or is
computed in the general way; where a user would want to know, the report says so. The numbers were chosen so
that models in use stay within them and nothing takes more than seconds; most were not measured beyond that.
"""

from __future__ import annotations

# --- the language ---

STATEMENT_WORDS = 800
"""Words of one statement of a score program. A longer one does not parse (so that nothing that walks its tree
runs out of stack), and what would become one is refused."""
WORDS_COUNTED = 1 << 60
"""Words of an expression are counted up to here; every other budget is far below."""

# --- what a value of a graph means ---

FORMULA_WORDS = 2 * STATEMENT_WORDS
"""Words of a formula that is to become a program. In a model that loops over its own results formulas double
with every step: past this the value is not looked into."""
MASK_NODES = 200
"""Nodes of the formula of a mask or a bias. What has a longer one stays a tensor that the scores read."""
SUM_NODES = 20_000
"""Nodes of an expression in which a weighted sum is looked for. A longer one is not searched."""
KEY_ORDERS = 4
"""Key variables of which every order is tried. More are tried only in the order that they come in."""
SUMMANDS = 4
"""Pieces into which a sum over a range of known length is written out. A longer sum stays a sum."""
SELECTIONS = 8
"""Selections that a comparison is drawn into: two tables of n regions give n * n comparisons. With more it
stays a comparison of selections."""
COMPARISONS = 8
"""Comparisons of one conjunction that are held against each other. With more, all are kept."""
TABLE_ELEMENTS = 1 << 26
"""Elements of a known tensor whose values are read. A larger one is read as data."""
TABLE_OPS_BY_RULE, TABLE_OPS = 8, 64
"""Ops that wrote a known tensor. Past the first number it is described by its values if possible, else by the
rules of its ops; past the second by its values alone."""
LISTED_PLACES = 16
"""Entries of an index that are compared with a place one by one. A longer list has no element rule."""
ROUTING_OPS = 12
"""Ops between a softmax and a choice of the largest few that is said to go with it. One that is farther off
is not mentioned."""
TOKEN_PAIRS = 24
"""Tokens among which a pair that breaks causality is looked for. The reason then names no pair."""

# --- trials ---

CHECK_BYTES = 4 << 30
"""Bytes in float64 of a claim's check. A claim that needs more at all sizes is refused."""
PROBE_NODES, PROBES = 80, 400
"""Ops that are tried out together on tokens in another order, and trials on one graph. Past either, what no
element rule explains is taken to mix tokens."""

# --- calls ---

GRAPHS_KEPT = 8
"""Graphs that a compiled model keeps, and that a decoder keeps. The one used longest ago is traced again."""
GUARDED_ELEMENTS = 1 << 22
"""Elements of buffers that are compared with what they were at every call. Larger ones are trusted as long as
they are the same tensor at the same version (a write through `.data` escapes that)."""
STATE_ENTRIES, STATE_DEPTH, STATE_BYTES = 256, 6, 1 << 12
"""Entries of a container, depth of nesting, and bytes of an array that are looked at as the state of a model.
Beyond, an object is known by its identity alone."""
