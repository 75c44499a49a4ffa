"""Whatever word of a report tries to be markup is shown as text: names, source, comments, reasons."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attngraph.report import page
from attngraph.report.report import CompileReport
from tests.page.conftest import EVIL
from tests.page.test_page import Structure

UNKNOWN = (
    "img",
    "iframe",
    "object",
    "embed",
    "form",
    "base",
    "foreignobject",
    "image",
    "use",
    "animate",
    "link",
)


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a report there are words."""
    if isinstance(value, str):
        yield way
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from places(getattr(value, field.name), (*way, field.name))
    elif isinstance(value, tuple):
        for number, inner in enumerate(value):
            yield from places(inner, (*way, number))


def put(value: Any, way: tuple[Any, ...], change: Callable[[str], str]) -> Any:
    if not way:
        return change(value)
    first, *rest = way
    if isinstance(first, str):
        return dataclasses.replace(value, **{first: put(getattr(value, first), tuple(rest), change)})
    return (*value[:first], put(value[first], tuple(rest), change), *value[first + 1 :])


def require_harmless(text: str) -> None:
    text.encode()
    found = Structure(text)
    assert not {name for name, _ in found.elements}.intersection(UNKNOWN)
    assert len(found.named("script")) == 2
    assert not [a for _, attributes in found.elements for a in attributes if a.startswith("on")]
    assert not [
        v for _, attributes in found.elements for a, v in attributes.items() if a in ("src", "action")
    ]
    assert all((a.get("href") or "#").startswith("#") for a in found.named("a"))
    (policy,) = (m["content"] for m in found.named("meta") if m.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "\u202e" not in text and "\x00" not in text


@pytest.mark.parametrize("which", ["decoder", "missed"])
def test_a_word_in_any_field_is_text(which: str, request: pytest.FixtureRequest) -> None:
    report: CompileReport = request.getfixturevalue(which)
    kinds: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for way in places(report):  # one of each kind: numbers of entries do not matter
        kinds.setdefault(tuple(p for p in way if isinstance(p, str)), way)
    assert len(kinds) > 15
    for way in kinds.values():
        for change in (lambda _: EVIL, lambda old: old.replace("\n", f"{EVIL}\n") + EVIL):
            try:
                text = page.render(put(report, way, change), EVIL)
            except ValueError:
                continue  # a field that has to be a number, or a program
            require_harmless(text)


def test_reasons_and_names_of_weights_are_text_too(pieces: CompileReport) -> None:
    report = pieces
    broken = tuple(dataclasses.replace(b, reason=EVIL, source=EVIL) for b in report.breaks)
    text = page.render(
        dataclasses.replace(report, breaks=broken, numbers=broken, retraces=((EVIL, 2),)), EVIL,
        {EVIL: torch.rand(1, 2, 4, 4)}, report,
    )  # fmt: skip
    require_harmless(text)
    assert "<img" not in dataclasses.replace(report, breaks=broken)._repr_html_()
