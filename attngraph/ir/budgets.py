"""Budgets: limits on the compiler's work; each states what it bounds and what happens when it is exceeded.

No budget affects correctness. When one is exceeded, a part of the model is left unchanged or computed in the
general way; the report says so where it matters to users. The numbers were chosen so that models in use stay
within them and nothing takes more than seconds; most were not measured beyond that.
"""

# --- the language ---

STATEMENT_WORDS = 800
"""Words of one statement of a score program. A longer statement does not parse, which bounds the recursion
depth of everything that walks its tree; an attention whose scores would need one is not fused."""
WORDS_COUNTED = 1 << 60
"""The word count of an expression saturates here, far above every other budget."""

# --- what a value of a graph means ---

FORMULA_WORDS = 2 * STATEMENT_WORDS
"""Words of a formula that may become part of a score program. Where a model feeds results back in a loop, the
formula can double with every iteration; a value with a longer formula is treated as opaque."""
MASK_NODES = 200
"""Nodes of the formula of a mask or a bias. With more, the mask or bias stays a tensor that the scores
read."""
SUM_NODES = 20_000
"""Nodes of an expression that is searched for a weighted sum. A larger expression is not searched."""
KEY_ORDERS = 4
"""Key variables for which every permutation is tried. With more, only the order of occurrence is tried."""
SIDES = 6
"""Sets of sizes for which a model that asks for them is traced once more, to see that it makes no difference.
The graph is not for the others."""
SUMMANDS = 4
"""Terms into which a sum over a range of known length is unrolled. A longer sum is not unrolled."""
SELECTIONS = 8
"""Selections (`where`) into whose branches a comparison is moved: two tables of n regions give n * n
comparisons. With more, it stays a comparison of selections."""
COMPARISONS = 8
"""Comparisons of one conjunction that are checked for implying each other. With more, all are kept."""
TABLE_ELEMENTS = 1 << 26
"""Elements of a known tensor whose values are read. A larger one is read as data."""
TABLE_OPS_BY_RULE, TABLE_OPS = 8, 64
"""Ops that computed a tensor of known contents. With more than the first number, the tensor is described by
its values if possible, else by the rules of its ops; with more than the second, by its values alone."""
LISTED_PLACES = 16
"""Entries of an index list that are compared with a position one by one. Longer ones have no element rule."""
SCORE_OPS = 100
"""Operations between products and a sum that they weigh without a softmax. With more, a sum is taken for no
attention: where a triangular system is solved row by row, each row follows from all before."""
ROUTING_OPS = 12
"""Largest distance, in ops, between a softmax and a top-k for the report to call the softmax a router. A
top-k farther away is not mentioned."""
PAIRS_LOOKED_AT = 1 << 20
"""Pairs of a query and a key among which the report looks for queries that see no key. In larger calls it
looks at the first and the last query."""
TOKEN_PAIRS = 24
"""Tokens that are searched for a pair that breaks causality. If none is found, the reason names no pair."""

SUM_ATTEMPTS = 60
"""Values of a graph that are unfolded to see whether they are sums over earlier tokens. The others are taken
to mix tokens."""

# --- trials ---

SAMPLE_BYTES = 1 << 26
"""Bytes, in float64, of a sample for the numerical check. Above them the sizes that can be chosen are chosen
as small as possible; where none can be, and no mask is among the values, there is one sample, not two."""
CHECK_BYTES = 4 << 30
"""Bytes, in float64, of the numerical check of a fusion. One that needs more at every size is refused."""
PROBE_NODES, PROBES = 80, 400
"""Ops that one probe runs on permuted tokens, and probes per graph. Beyond either, an op that no element rule
covers is assumed to mix tokens."""
HISTORY_NODES = 400
"""Ops that a step of a decoder runs again for a value that is computed from all earlier tokens."""
TRIED_LENGTHS = 24
"""Of the numbers of tokens at which it is seen that a value looks back alone, so many, the fewest and the
most."""
LEAST_TOKENS = 1 << 10
"""So many tokens a model may at most need for what it does with blocks of them."""
PROBE_BYTES = 1 << 28
"""Bytes, in float64, of a whole model that is run to find a token that sees a later one, for an error; and of
what one probe runs, which is not tried beyond."""
PROBE_TOKENS = 1024
"""Tokens of a trial, which are more than the numbers of its operations reach
(`meaning/tokens/numbers.py`). What needs more is not tried."""
CARRY_TOKENS = 2048
"""The same where it is tried whether sums over earlier tokens are carried."""
PROBE_ATTEMPTS = 8
"""How often a probe is begun further back, where what it begins with is computed from the same integers."""

# --- calls ---

TIMED_SCORES = 1 << 25
"""Scores per attention, all of which the model itself may have in memory. With more, it is not tried whether
it is faster, and the graph serves."""
FUSED_SCORES = 1 << 20
"""Scores per attention, in the mean over a graph's attentions. With fewer, a call on the CPU runs the model
itself, which is at least as fast at such sizes; the report says so."""
PADDING = 0.08
"""The share of hidden tokens from which they are left out. With fewer, all are computed: the others would
have to be copied together, and little be saved. A guess: none and 42 % of padding were measured."""
GRAPHS_KEPT = 8
"""Graphs that a compiled model, or a decoder, keeps. The least recently used one is dropped, and traced again
if it is needed."""
FUNCTIONS_KEPT = 32
"""Pairs of functions, given to `attngraph.attention`, that are kept compiled. The oldest is dropped."""
SIZE_OPS = 16
"""Operations in a quotient or remainder of symbolic sizes that torch evaluates during a trace. With more, the
sizes in it are taken as numbers, and calls with other sizes are traced again."""
QUOTIENTS_OF_TOKENS = 24
"""Formulas with a quotient of the number of tokens at which the trace of a decoder stops once, to find out
without a trace whether the model runs a loop over tokens or chunks."""
SMALL_CALLS_KEPT = 4096
"""Shapes of calls that are remembered as running the model itself. Beyond, the question is asked again."""
RETRACES_TOLD = 4
"""How often a model is traced again for one cause before it warns of it."""
SETTLING_CALLS = 4
"""Calls of a model that ran as they are because the model filled a table for later calls. After them, a model
that goes on changing its attributes is captured in pieces."""
GUARDED_ELEMENTS = 1 << 22
"""Elements of buffers whose contents are compared at every call. Larger ones are compared by address and
version only, which misses a write through `.data`."""
STATE_ENTRIES, STATE_BYTES = 256, 1 << 12
"""Entries of a container, and bytes of an array, that are examined as state of a model in any case. Larger
ones are examined if the code that a trace ran has their names, else compared by identity."""
STATE_ENTRIES_READ, STATE_DEPTH = 1 << 16, 50
"""Entries of a container, and depth of nesting, beyond which what the code reads cannot be watched: such a
model is captured in pieces."""
RECORDED_TOKENS = 256
"""New tokens of a decoder's call that is recorded when its shapes come again. With more, the graph runs: what
lies between the compiled calls is then a small part of the time."""
RECORDINGS, RECORDED_BYTES = 8, 1 << 27
"""Recordings that a decoder's graph keeps, and bytes of the results of their compiled calls. The one that was
not used for longest is dropped; a call that would need more bytes by itself is not recorded."""
MEMORY_KEPT = 1 << 29
"""Bytes of freed memory on the CPU that are kept for new tensors. More are given back to the system."""
