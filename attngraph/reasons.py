"""The kinds of reasons: a stable code for each, and what to change in the model.

A reason is a sentence, made where something stands in the way (`Refusal`, `CaptureError`, `NoDecoderError`).
Its kind is known by fixed words of it, so a report that is read from a file and an error have theirs too.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kind:
    """`code` stays the same from version to version; `change` says what to change, or "nothing"; a reason
    with one of these `words` is of this kind."""

    code: str
    change: str
    words: tuple[str, ...] = ()


_NOTHING = "nothing: it is no attention, or a fused one would save nothing"
_REPORT = "nothing in the model: please report it; the model still runs as it is written"
_ONE_DOT = "compute each score as one product of a query and a key, and masks and biases after it"

OTHER, IN_PIECES, OF_NUMBERS = (
    Kind("other", "read the reason"),
    Kind("captured-in-pieces", "move what the reason names out of forward, or write it in tensor operations"),
    Kind("size-is-a-number", "write the line so that it works for any size"),
)
"""Of a reason whose words are no row's: of a place, where capture stopped, and of a size."""

KINDS = (
    # --- something that looks like attention was not fused
    Kind("divisor-plus-number", "leave out what is added to the divisor, or the shift of the scores",
         ("leave out the one or the other",)),
    Kind("used-elsewhere", "return what is computed from the weights beside what is computed from the "
         "values, not joined with it; look at weights with compiled.weights",
         ("so fusing would not remove them", "are needed anyway")),
    Kind("other-divisor", "divide the exponentials by their own sum over the keys, and by nothing else",
         ("what they are divided by was not recognised", "what divides it is changed by",
          "not divided by their own sum", "not divided by the sum of", "shifted by different amounts")),
    Kind("blocks-of-keys", "in the loop over blocks, count each key once in the sum and in its divisor, and "
         "rescale both whenever the maximum changes",
         ("blocks of its keys", "what divides it counts", "the values of some keys are added up",
          "some of its keys are taken one by one")),
    Kind("other-dimension", "sum the values over the dimension of the keys, over which the softmax runs",
         ("over another dimension than the one", "over other places than the keys")),
    Kind("two-softmaxes", "apply what follows to each of the softmaxes",
         ("two softmaxes, but are not a sum",)),
    Kind("pair-values", "nothing: as an attention, keys or values would be copied for each query",
         ("would be copied for each query", "would need a copy of its keys")),
    Kind("band", "give each query a score for each key, and mask those outside the band",
         ("places that depend on query and key together",)),
    Kind("two-dimensions", "nothing: its softmax is not over the keys of each query",
         ("runs over two dimensions at once",)),
    Kind("no-attention", _NOTHING,
         ("nothing is summed with its weights", "but no values are weighed by them",
          "values that another softmax weighs", "as a router of experts does", "where an index says",
          "has one key, whose weight is 1", "runs over features", "exponentials of two tensors and sums",
          "weights are no larger than these", "it has no elements in a call")),
    Kind("two-values", "multiply the two tensors into one before they are weighed",
         ("two tensors are multiplied as values",)),
    Kind("distances", "write squared distances as q.q + k.k - 2 * (q @ k.mT)", ("its scores are distances",)),
    Kind("no-product", _ONE_DOT, ("without a product of queries and keys",)),
    Kind("rounded-scores", "leave the scores in the dtype of queries and keys",
         ("its scores are rounded to",)),
    Kind("second-sum", "let a weight depend on its own score and on one softmax over the keys",
         ("a second sum over the keys",)),
    Kind("other-index", "let a score depend on its batch, head, query and key alone",
         ("the scores vary with something",)),
    Kind("too-long", "compute parts that a score uses again and again as tensors of their own",
         ("are a formula of more than", "elements is too large to be examined")),
    Kind("loop", "compute the scores by one product, not in a Python loop", ("too many operations follow",)),
    Kind("no-view", "let queries, keys and values be views of tensors: flip or index keys before the product",
         ("are no view of a tensor", "that its queries, keys and values lack",
          "something that is no dimension of the result", "is no dimension of a tensor that is there")),
    Kind("whole-numbers", "convert queries, keys and values to floating point", ("are whole numbers",)),
    Kind("unknown-operation", "write the step that the reason names with other operations, or add a rule",
         ("is not looked into", "is no tensor", "has a data-dependent size", "sums over the batch",
          "between its scores and the sum of its values stands")),
    Kind("sizes-of-data", "nothing: data decide the sizes",
         ("its sizes follow from data", "a size that only data")),
    Kind("not-the-same", "remove large constants from the scores; if there are none, please report it",
         ("would not compute the same",)),
    Kind("compiler-error", _REPORT,
         ("please report it", "Please report it", "than rounding explains", "do not give", "without scales",
          "no more are made")),
    # --- an attention without a softmax, or one whose keys are made from a latent, was left as it is
    Kind("not-linear", "nothing: keys and values cannot be summed first",
         ("just a multiple of the scores", "multiplied by something that depends on the key",
          "neither causal nor none", "more operations at these sizes")),
    Kind("left-expanded", "nothing, or remove the bias, the sink or the cast that the reason names",
         ("not only shifted by it", "weights that do not add up to one", "queries differ in dtype",
          "could be kept for", "the operations for nothing", "before they are projected")),
    # --- the model was not captured whole
    Kind("values-decide", "choose by torch.where, or decide outside of the model",
         ("depends on the values of a tensor",)),
    Kind("side-effect", "do it outside of forward",
         ("forward() prints", "forward() changes", "forward() calls", "forward() computes gradients",
          "forward() registers", "forward() asks for", "forward() advances", "forward() enters",
          "forward() writes", "forward() reads")),
    Kind("higher-order", "write plain operations in its place", ("a higher-order operation of torch",)),
    Kind("gradients-pass-by", "do not write in place to what gradients flow through", ("gradients pass by",)),
    Kind("asks-for-a-size", "compute with x.shape[0] in place of int(x.shape[0]), and compare "
         "torch.arange in place of loops over positions", ("asks for the number itself",)),
    # --- no decoder can be derived
    Kind("training-mode", "call model.eval() first", ("training mode", "drops weights at random")),
    Kind("sees-later-tokens", "mask later tokens; where a mask is there that could not be followed, "
         "CacheConfig(assume_causal=True)",
         ("sees later tokens", "in both directions", "hide all later tokens",
          "that no token sees a later one", "the first token sees nothing", "data may hide every key",
          "prompts it takes none")),
    Kind("mixes-tokens", "compute each token from itself and earlier ones: by causal attention, "
         "convolutions, running sums",
         ("every token is read", "from itself and earlier tokens alone", "no sum over earlier tokens",
          "token by token from the tokens", "cannot be traced for sequences of any length",
          "from the last tokens alone", "data choose the token")),
    Kind("counts-tokens", "let nothing depend on how many tokens or sequences there are",
         ("how many tokens there are", "numbers of tokens", "with one sequence",
          "sequences gives something else", "a number of tokens or not", "sequences of fewer than",
          "a case of their own for each of",
          "is needed for every token", "has not as many places", "several keys for each token",
          "Sizes of the model are numbers")),
    Kind("tokens-elsewhere", "give tokens [batch, tokens] a dimension of their own, in arguments too",
         ("its tokens have shape", "not called with tokens", "with an entry for each pair of tokens",
          "in another place than a decoder",
          "tokens as a dimension of their own", "by an index that follows from their places",
          "without a batch", "a value of each sequence", "a view of something kept",
          "scores read a value of each token", "no knowing how much to keep")),
    Kind("not-for-new-tokens", "write the operation that the reason names token by token",
         ("cannot be computed for",)),
    Kind("around-the-call", "leave the mode or the hook for the call", ("a decoder would run past it",)),
    Kind("writes", "store what forward writes outside the model", ("the model writes to a",)),
    Kind("results", "return the logits of all tokens",
         ("returns no tensor", "for a draft", "what a draft is given", "computes logits of every token",
          "only the last token is read")),
    Kind("ranks", "let each rank have it whole, as the reason says",
         ("which no rank has whole", "leave ShardConfig")),
)  # fmt: skip


def kind_of(reason: str, otherwise: Kind = OTHER) -> Kind:
    """The kind of a reason: the first with words of it, `otherwise` if there is none."""
    return next((kind for kind in KINDS if any(words in reason for words in kind.words)), otherwise)
