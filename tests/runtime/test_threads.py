"""Threads trace and serve at once: whatever traces waits its turn, and every answer is eager's."""

import pytest
import torch

import attngraph
from attngraph.models.targets import tiny_decoder_lm
from tests.runtime.small import SelfAttention, together

THREADS = 8


def test_compiled_modules_and_decoders_trace_and_serve_at_once() -> None:
    model, (ids,) = tiny_decoder_lm(tokens=12)
    model.eval()
    compiled, decoder = attngraph.compile(model), attngraph.compile(model, cache=True)
    prompts = [ids[:, : 5 + n % 4] for n in range(THREADS)]
    with torch.no_grad():
        wanted = [model(p) for p in prompts]

    def call(n: int) -> None:
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(compiled(prompts[n]), wanted[n], rtol=1e-4, atol=1e-5)

    def decode(n: int) -> None:
        for _ in range(3):
            logits, state = decoder.prefill(prompts[n][:, :-1])
            last = decoder.decode(prompts[n][:, -1:], state)
            found = torch.cat([logits, last], 1)
            torch.testing.assert_close(found, wanted[n], rtol=1e-4, atol=1e-5)

    works = [lambda n=n: (call if n % 2 else decode)(n) for n in range(THREADS)]
    together(works)  # type: ignore[arg-type]


@pytest.mark.slow
def test_explaining_converting_and_calling_at_once() -> None:
    model, (ids,) = tiny_decoder_lm(tokens=12)
    model.eval()
    small, x = SelfAttention().eval(), torch.randn(2, 5, 8)
    # Only compiled models wait: the model itself, called while another thread traces it, would meet fakes.
    compiled, language_model = attngraph.compile(small), attngraph.compile(model)
    with torch.no_grad():
        wanted, logits = small(x), model(ids)
    done: list[str] = []
    problems: list[BaseException] = []

    def look() -> None:
        assert len(attngraph.explain(model, ids).attention) == 2
        assert attngraph.bisect(model, ids).culprit == ""
        done.append("looked")

    def convert() -> None:
        converted = attngraph.convert_heads(model, ids, kv_heads=1)
        assert converted(ids).shape == logits.shape
        done.append("converted")

    def serve() -> None:
        while len(done) < 2 and not problems:
            assert torch.get_default_dtype() is torch.float32
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(language_model(ids), logits, rtol=1e-4, atol=1e-5)

    together([look, convert, *[serve] * (THREADS - 2)], problems)
