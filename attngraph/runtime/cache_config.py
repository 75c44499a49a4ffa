"""The options of a decoder's cache."""

import dataclasses

import torch

from attngraph.ir.ops.quantised import LARGEST

LAYOUTS = ("contiguous", "paged")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *LARGEST)
"""Of cached values."""


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Options of a decoder's cache.

    Args:
        max_length: the most tokens per row; None: as many as the model supports.
        dtype: of cached values; None: as computed. `torch.int8` and `torch.float8_e4m3fn` keep keys, values
            and latents rounded, with a scale for each token and head: a quarter of the bytes, and results
            that are approximate; the report says by how much.
        layout: "contiguous" (each row's tokens in one block, which grows by doubling) or "paged" (pages of
            `page` tokens that rows can share: beams, common prefixes, an engine).
        page: tokens per page.
        rollback: how many tokens `KVCache.crop` can remove where a sliding window overwrites older ones.
        snapshots: before how many of the latest calls a row's sums over its tokens are kept, so that
            `KVCache.crop` can go back there (a token cannot be taken out of a sum).
        tokens: the name of the model's argument that takes the tokens (None: `decoder_input_ids` if there is
            one, else the first argument that is not given).
        assume_causal: whether to take it from you that no token sees a later one, where this cannot be shown
            (an operation that hides what it reads); the report then says where.
        beside: the name (of a tuple the number) of another result of forward, with an entry for each token,
            that a draft is given: hidden states, or the guesses of heads of the model's own. Of a tuple of
            tensors it is the last one (`hidden_states`).
        proof: whether prefill and decode are compared with whole sequences, in float64, before first use.

    Raises:
        ValueError: a value is out of range.
    """

    max_length: int | None = None
    dtype: torch.dtype | None = None
    layout: str = "contiguous"
    page: int = 64
    rollback: int = 32
    snapshots: int = 0
    tokens: str | None = None
    assume_causal: bool = False
    beside: str | None = None
    proof: bool = True

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, found {self.layout!r}.")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, found {self.max_length}.")
        if self.page < 1 or self.rollback < 0 or self.snapshots < 0:
            raise ValueError(
                "page must be positive, rollback and snapshots not negative: "
                f"{self.page}, {self.rollback}, {self.snapshots}."
            )
        if self.beside is not None and self.dtype in LARGEST:
            raise ValueError(f"beside={self.beside!r} does not go with a cache of 8 bits.")
        if self.dtype is not None and self.dtype not in DTYPES:
            known = ", ".join(str(d) for d in DTYPES)
            raise ValueError(
                f"a cache's dtype must be one of {known}, found {self.dtype}: values of other dtypes are not "
                "read by any kernel."
            )

    @property
    def rounded(self) -> str:
        """The name of the dtype of 8 bits in which keys and values are kept with scales, or "" otherwise."""
        return str(self.dtype).removeprefix("torch.") if self.dtype in LARGEST else ""

    @property
    def floating(self) -> torch.dtype | None:
        """The dtype of what is kept as floating values without scales; None: as the graph gives it."""
        return None if self.rounded else self.dtype
