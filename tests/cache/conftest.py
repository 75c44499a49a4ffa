"""What the tests of decoders share: pages in which nothing is zero by chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attngraph.runtime import pages


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever no token has been written to holds NaN."""
    empty = pages.Pages._empty

    def filled(self: Any, members: Any, pages: int) -> Tensor:
        made = empty(self, members, pages)
        return (
            made.fill_(torch.nan)
            if made.is_floating_point()
            else made.fill_(-7 if made.dtype != torch.bool else True)
        )

    monkeypatch.setattr(pages.Pages, "_empty", filled)
