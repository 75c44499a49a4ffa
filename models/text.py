"""Real text to run the models on, without a download.

With random ids attention is nearly uniform and losses say nothing. The topics of Python's own help are some
hundreds of kilobytes of English that every installation has, and bytes need no tokenizer: the
vocabulary is 256.
"""

from functools import lru_cache
from pydoc_data.topics import topics

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def topics_text() -> bytes:
    """The help topics of this Python's standard library, by name, joined as UTF-8 bytes.

    The text differs a little from one Python version to the next.
    """
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def byte_batch(batch: int, tokens: int, *, seed: int = 0) -> Tensor:
    """Windows of the text at seeded random places: int64 `[batch, tokens]`, values 0 to 255.

    For a training pair take one token more: `ids, targets = w[:, :-1], w[:, 1:]`. Raises
    ValueError where a window is longer than the text, or either size is less than 1.
    """
    text = torch.frombuffer(bytearray(topics_text()), dtype=torch.uint8)
    if batch < 1 or not 1 <= tokens <= len(text):
        raise ValueError(
            f"cannot cut batch={batch} windows of tokens={tokens} from a text of {len(text)} "
            "bytes: batch must be at least 1 and tokens from 1 to the length of the text"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - tokens + 1, (batch,), generator=generator)  # [batch]
    return text[starts[:, None] + torch.arange(tokens)].long()
