"""Writing markup: every text is escaped, so that no name in a model can become an element.

`tag` makes an element; what is put inside is text, unless it is already `Html`. Characters that control a
display instead of being shown (controls, the direction marks of bidirectional text, halves of surrogate
pairs) are written as escapes such as `\\u202e`, so that no name can rearrange the text around it.
"""

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufeff\ufffe\uffff]"
)
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"
_EMPTY = {"meta", "link", "input", "br", "rect", "path", "col", "circle"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def visible(text: str) -> str:
    """The text with every invisible character written as an escape."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def html(text: str) -> Html:
    """Text as markup: escaped, unless it is markup already."""
    return text if isinstance(text, Html) else Html(escape(visible(text)))


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Texts and markup, one after the other."""
    return Html(html(between).join(html(part) for part in parts))


def tag(name: str, /, *inside: str, **attributes: str | int | float | bool | None) -> Html:
    """An element. An attribute that is True has no value, False and None are left out; `class_` is `class`,
    other underscores are hyphens."""
    start = f"<{name}"
    for key, value in attributes.items():
        if value is not None and value is not False:
            start += f" {key.rstrip('_').replace('_', '-')}"
            start += "" if value is True else f'="{html(str(value))}"'
    return Html(f"{start}/>" if name in _EMPTY else f"{start}>{joined(inside)}</{name}>")


def hint(*inside: str, **attributes: str | int) -> Html:
    """A paragraph that explains."""
    return tag("p", *inside, class_="hint", **attributes)


def items(parts: Iterable[str], **attributes: str) -> Html:
    """A list with these items."""
    return tag("ul", *(tag("li", part) for part in parts), **attributes)


def cards(parts: Iterable[str]) -> Html:
    return items(parts, class_="cards")


def listing(label: str, *inside: str, **attributes: str | int) -> Html:
    """Lines as they are written, which the keyboard can scroll."""
    return tag("pre", *inside, tabindex=0, role="group", aria_label=label, **attributes)


def table(names: Iterable[str], rows: Iterable[Sequence[str]], kind: str) -> Html:
    """A table; the first cell of a row names it."""
    head = tag("tr", *(tag("th", name, scope="col") for name in names))
    body = (
        tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in cells))
        for first, *cells in rows
    )
    return tag("table", tag("thead", head), tag("tbody", *body), class_=kind)


def panel(name: str, *inside: str) -> Html:
    """An article that is named by its heading, whose id is `name`."""
    return tag("article", *inside, class_="panel", aria_labelledby=name)


def heading(name: str, title: str, more: str = "") -> Html:
    """The heading of a panel."""
    return tag("h3", title, tag("span", f" {more}", class_="sub"), id=name)


def section(name: str, title: str, inside: Iterable[str], **attributes: str) -> Html:
    """A part of a page, which is named by its heading."""
    head = tag("h2", title, id=f"{name}-title")
    return tag("section", head, *inside, **attributes, aria_labelledby=f"{name}-title")


def document(heading: str, body: Iterable[str], script: str = "") -> str:
    """A whole page. Its content security policy lets it run `script`, by its hash, and nothing else, and lets
    it reach nothing outside itself."""
    runs = ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
        runs, body = f"script-src 'sha256-{digest}'; ", [*body, tag("script", Html(script))]
    policy = f"default-src 'none'; {runs}style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = tag(
        "head", tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", heading), tag("style", Html(asset("page.css"))),
    )  # fmt: skip
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n{tag("body", *body)}\n</html>\n'


def asset(name: str) -> str:
    """The text of a file beside this one."""
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    assert "</s" not in text, f"{name} would end its own element"
    return text


def picture(svg: str, name: str) -> Html:
    """An SVG of ours. Equal pictures would have equal ids, and an id must occur only once in a page."""
    return Html(re.sub(r"\battngraph-[0-9a-f]{10}\b", name, svg))


def repeated(count: int) -> str:
    """` x 12`, or nothing for one."""
    return f" {TIMES} {count}" if count > 1 else ""


def plural(count: int, one: str, many: str = "") -> str:
    """`1 line`, `1,024 lines`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def span_of_names(names: list[str]) -> str:
    """Names of equal things, abbreviated: `h.0`, `h.0 and h.1`, `h.0 .. h.11`; with gaps, the first few."""
    names = list(dict.fromkeys(name for name in names if name))
    if len(names) <= 2:
        return " and ".join(names)
    if _counts_up(names):
        return f"{names[0]} .. {names[-1]}"
    if len(names) <= 6:
        return ", ".join(names)
    return f"{', '.join(names[:5])} and {len(names) - 5:,} more"


def _counts_up(names: list[str]) -> bool:
    """Whether names differ in one number alone, which grows by one."""
    if len({re.sub(r"\d+", "#", name) for name in names}) > 1:
        return False
    columns = list(zip(*(map(int, re.findall(r"\d+", name)) for name in names), strict=True))
    moving = [column for column in columns if len(set(column)) > 1]
    return len(moving) == 1 and all(b == a + 1 for a, b in itertools.pairwise(moving[0]))
