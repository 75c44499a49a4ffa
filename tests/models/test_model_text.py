"""The text is real, and batches of it are windows of it."""

import pytest
import torch

from attngraph.models.text import byte_batch, topics_text


def test_the_text_is_long_english() -> None:
    text = topics_text()
    assert len(text) > 100_000
    assert b"statement" in text


def test_every_row_of_a_batch_is_a_window_of_the_text() -> None:
    batch = byte_batch(5, 300)
    assert batch.shape == (5, 300)
    assert batch.dtype == torch.int64
    assert all(bytes(row) in topics_text() for row in batch.tolist())
    assert len({bytes(row) for row in batch.tolist()}) > 1


def test_a_seed_always_gives_the_same_windows_and_another_gives_others() -> None:
    assert torch.equal(byte_batch(2, 50, seed=7), byte_batch(2, 50, seed=7))
    assert not torch.equal(byte_batch(2, 50, seed=7), byte_batch(2, 50, seed=8))


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    byte_batch(2, 50)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_window_may_be_the_whole_text_and_no_longer() -> None:
    length = len(topics_text())
    assert bytes(byte_batch(1, length)[0].tolist()) == topics_text()
    for batch, tokens in [(1, length + 1), (1, 0), (0, 1)]:
        with pytest.raises(ValueError, match="cannot cut"):
            byte_batch(batch, tokens)
