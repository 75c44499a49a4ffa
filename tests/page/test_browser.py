"""The page in a real browser: it loads alone, does what it says by mouse and by keyboard, and runs no name.

Needs playwright's Python package and a Chromium that is installed already: `ATTNGRAPH_CHROMIUM`, or one of
the usual names on the path. Nothing is downloaded.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attngraph.report.report import CompileReport

api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("ATTNGRAPH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: set ATTNGRAPH_CHROMIUM")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a report's page; at the end nothing may have gone wrong in it, or out of it."""
    contexts, requests, problems = [], [], []
    file = tmp_path / "page.html"

    def opened(report: CompileReport, viewport: dict[str, int] = DESKTOP, **settings: Any) -> Any:
        report.to_html(file)
        context = browser.new_context(viewport=viewport, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda problem: problems.append(str(problem)))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems
    assert {url.partition("#")[0] for url in requests} <= {file.as_uri()}


def shown_passes(page: Any) -> list[str]:
    return [item.text_content() for item in page.locator(".passes > li:visible .name").all()]


def test_a_click_on_a_pass_shows_what_it_changed(show: Callable[..., Any], decoder: CompileReport) -> None:
    page = show(decoder)
    item = page.locator(".passes > li", has_text="fuse-attention").first
    assert not item.locator(".diff").is_visible()
    item.locator("summary").first.click()
    assert item.locator(".replaced pre:last-child", has_text="attention(").first.is_visible()
    assert item.locator(".replaced pre:first-child", has_text="softmax(").first.is_visible()
    left, right = (
        item.locator(f".replaced pre:{side}-child").last.bounding_box() for side in ("first", "last")
    )
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]


def test_on_a_phone_what_was_stands_above_what_is(show: Callable[..., Any], decoder: CompileReport) -> None:
    page = show(decoder, PHONE)
    item = page.locator(".passes > li", has_text="fuse-attention").first
    item.locator("summary").first.click()
    left, right = (
        item.locator(f".changed pre:{side}-child").first.bounding_box() for side in ("first", "last")
    )
    assert left["x"] == right["x"] and left["y"] + left["height"] <= right["y"]


def test_unchanged_passes_wait_until_asked_for(show: Callable[..., Any], decoder: CompileReport) -> None:
    page = show(decoder)
    changed = [p.name for p in decoder.passes if p.changed]
    assert shown_passes(page) == ["capture", *changed]
    assert page.locator("#found").text_content() == (
        f"{len(changed)} passes shown, {len(decoder.passes) - len(changed)} unchanged hidden"
    )
    page.get_by_label("Show unchanged passes").check()
    assert shown_passes(page) == ["capture", *(p.name for p in decoder.passes)]


def test_search_keeps_what_matches_and_counts_it(show: Callable[..., Any], decoder: CompileReport) -> None:
    page = show(decoder)
    total = len(decoder.passes)
    page.get_by_label("Search passes").fill("insert kv")
    assert shown_passes(page) == ["insert-kv-cache"]
    assert page.locator("#found").text_content() == f"1 of {total} passes found"
    page.get_by_label("Search passes").fill("MERGE-heads")
    assert shown_passes(page) == []
    assert page.locator("#found").text_content() == f"0 of {total} passes found, 1 unchanged hidden"
    page.get_by_label("Search passes").fill("")
    assert len(shown_passes(page)) == 1 + sum(p.changed for p in decoder.passes)


def test_search_finds_what_is_folded_and_what_charts_show(
    show: Callable[..., Any], equal_layers: Callable[[int], CompileReport]
) -> None:
    report = equal_layers(12)
    page = show(report)
    page.get_by_role("button", name="Open all").click()
    page.get_by_label("Search passes").fill("gelu")
    found = api.expect(page.locator("#found"))
    found.to_contain_text("of charts")
    assert "fuse-attention" in shown_passes(page)
    hits = page.locator(".fold[data-hits]")
    assert "found here" in hits.first.get_attribute("data-hits")
    boxes = page.locator(".chart g.hit")
    assert boxes.count() == page.locator(".chart g.hit title", has_text="gelu").count() > 0
    page.get_by_label("Search passes").fill("no such words")
    found.to_contain_text("0 of")
    assert page.locator(".hit, .fold[data-hits]").count() == 0


def test_a_fold_shows_the_lines_it_names(
    show: Callable[..., Any], equal_layers: Callable[[int], CompileReport]
) -> None:
    page = show(equal_layers(12))
    page.get_by_role("button", name="Open all").click()
    button = page.get_by_role("button", name="the same change in blocks.1 .. blocks.11")
    button.click()
    unfolded = page.locator(".unfolded")
    unfolded.locator(".replaced").first.wait_for()
    assert unfolded.locator(".replaced pre:last-child", has_text="attention(").count() == 11
    assert page.locator(".diff pre:last-child > span", has_text="gelu(").count() == 12 * 12
    button.click()
    assert not unfolded.is_visible()


def test_the_whole_graph_is_there_as_text(show: Callable[..., Any], decoder: CompileReport) -> None:
    page = show(decoder)
    page.locator("summary", has_text="capture").click()
    assert page.locator("[data-kind=capture] pre").text_content() == decoder.captured


def test_a_kernel_can_be_read_and_copied(
    show: Callable[..., Any], equal_layers: Callable[[int], CompileReport]
) -> None:
    page = show(equal_layers(2), permissions=["clipboard-read", "clipboard-write"])
    page.get_by_text("Source of cpu.compiled (2 lines)").click()
    assert page.locator(".source pre").is_visible()
    page.get_by_role("button", name="Copy cpu.compiled").click()
    page.get_by_text("Copied").first.wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "// kernel \nint main;\n"


def test_everything_is_reached_and_opened_from_the_keyboard(
    show: Callable[..., Any], equal_layers: Callable[[int], CompileReport]
) -> None:
    page = show(equal_layers(3))
    page.evaluate("document.getElementById('unchanged').click()")
    for details in page.locator("details").all():
        details.evaluate("(it) => { it.open = false; }")
    reached = []
    for _ in range(200):
        page.keyboard.press("Tab")
        what = page.evaluate(
            """() => { const it = document.activeElement; const style = getComputedStyle(it);
            return it === document.body ? null : [it.tagName + (it.className.baseVal ?? it.className ?? ""),
            it.matches("summary, button.fold"), style.outlineStyle !== "none" || it.matches("g"),
            (it.textContent || it.id).slice(0, 60)]; }"""
        )
        if what is None:
            break
        reached.append(what)
        if what[1]:
            page.keyboard.press("Enter")
            page.wait_for_timeout(20)
    assert page.evaluate("document.activeElement === document.body")
    assert reached[0][3] == "Skip to the report"
    assert all(focus_is_seen for _, _, focus_is_seen, _ in reached)
    for kind, count in (("details:not([open])", 0), ("button.fold[aria-expanded=false]", 0)):
        assert page.locator(kind).count() == count
    seen = [what for what, *_ in reached]
    assert "INPUT" in seen and "gattention shown" in seen and "BUTTONcopy" in seen
    assert sum(what == "SUMMARY" for what in seen) == page.locator("summary").count()


def test_arrow_keys_move_from_box_to_box_and_tell_each(
    show: Callable[..., Any], decoder: CompileReport
) -> None:
    page = show(decoder)
    chart = page.locator(".drawn", has=page.locator("g.attention")).first
    chart.locator("g.attention").first.focus()
    about = chart.locator(".about")
    first = about.text_content()
    assert "attention(" in first and "masked_attention.py:" in first
    page.keyboard.press("ArrowUp")
    assert about.text_content() != first
    page.keyboard.press("ArrowDown")
    assert about.text_content() == first
    assert chart.locator("g[tabindex='0']").count() == 1


def test_a_box_shows_the_users_code_and_a_line_leads_back_to_its_boxes(
    show: Callable[..., Any], missed: CompileReport
) -> None:
    page = show(missed)
    chart = page.locator(".drawn", has=page.locator("g.attention")).first
    box = chart.locator("g.attention").first
    box.focus()
    code = chart.locator(".yours")
    now = code.locator(".lines [aria-current]")
    now.first.wait_for()
    assert "conftest.py:" in box.locator("title").text_content()
    own = code.locator(".frame[aria-pressed=true]")
    assert own.count() == 0  # one line led to it: the model's own
    lines = code.locator("button.line:not([aria-current])")
    said = lines.first.text_content().split()[0]
    lines.first.click()
    api.expect(now.first).to_contain_text(said)
    assert f"conftest.py:{said}" in chart.locator("g.shown title").text_content()


def test_lines_of_code_can_be_walked_with_arrow_keys(show: Callable[..., Any], missed: CompileReport) -> None:
    page = show(missed)
    code = page.locator(".drawn", has=page.locator("g.attention")).first.locator(".yours")
    code.locator("button.line[tabindex='0']").focus()
    first = page.evaluate("document.activeElement.textContent")
    steps = ("ArrowUp", "ArrowDown") if code.locator("button.line").last.text_content() == first else (
        "ArrowDown", "ArrowUp")  # fmt: skip
    page.keyboard.press(steps[0])
    assert page.evaluate("document.activeElement.textContent") != first
    page.keyboard.press(steps[1])
    assert page.evaluate("document.activeElement.textContent") == first
    assert code.locator("button.line[tabindex='0']").count() == 1


def test_an_attention_and_its_box_lead_to_each_other(show: Callable[..., Any], missed: CompileReport) -> None:
    page = show(missed)
    page.evaluate("document.querySelectorAll('.layer').forEach((it) => { it.open = false; })")
    page.get_by_role("link", name="Show it in the graph").first.click()
    box = page.locator("g.attention:focus")
    assert box.is_visible() and box.get_attribute("data-panel") == "attention-0"
    drawn = page.locator(".drawn", has=page.locator("g.attention.shown"))
    drawn.get_by_role("link", name="What it computes").click()
    assert page.evaluate("location.hash") == "#attention-0"
    drawn.locator("g.op").first.focus()
    assert not drawn.locator(".led").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_nothing_overflows_in_any_width_and_scheme(
    show: Callable[..., Any],
    evil: CompileReport,
    decoder: CompileReport,
    viewport: dict[str, int],
    scheme: str,
) -> None:
    for report in (evil, decoder):
        page = show(report, viewport, color_scheme=scheme)
        page.get_by_role("button", name="Open all").click()
        for button in page.locator("button.fold:visible").all():
            button.click()
        page.evaluate("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(
    show: Callable[..., Any], evil: CompileReport, scheme: str
) -> None:
    """WCAG 2.2, 1.4.3: text has 4.5 times the luminance of its background, or the other way round."""
    page = show(evil, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    weak = page.evaluate(
        """() => {
          const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
            .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
          const parts = (color) => color.match(/[\\d.]+/g).map(Number);
          const behind = (it) => { for (; it; it = it.parentElement) {
            const color = parts(getComputedStyle(it).backgroundColor);
            if (color.length === 3 || color[3] > 0) return color; } };
          const found = [];
          for (const it of document.querySelectorAll("body *:not(script, style, svg, svg *)")) {
            if (!it.checkVisibility()) continue;
            if (![...it.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
            const [a, b] = [light(parts(getComputedStyle(it).color)), light(behind(it))];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) found.push([it.tagName, it.className, ratio]);
          }
          return found;
        }"""
    )
    assert not weak


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_axe_finds_nothing_folded_or_unfolded(
    show: Callable[..., Any],
    evil: CompileReport,
    missed: CompileReport,
    viewport: dict[str, int],
    scheme: str,
) -> None:
    """The rules of axe-core, if its package is installed."""
    package = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    rules = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    for report in (evil, missed):
        page = show(report, viewport, color_scheme=scheme, bypass_csp=True)
        page.evaluate(rules)
        for _ in range(2):
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            told = [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in found["violations"]]
            assert not told
            page.evaluate("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
            for button in page.locator("button.fold:visible").all():
                button.click()


def test_no_name_of_a_model_runs(show: Callable[..., Any], evil: CompileReport) -> None:
    page = show(evil)
    page.evaluate("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    for button in page.locator("button.fold:visible").all():
        button.click()
    page.locator("g.attention").first.focus()
    page.wait_for_timeout(200)
    assert page.evaluate("document.body.dataset.owned") is None
    assert page.locator("img").count() == 0
    assert "<img src=x onerror=" in page.locator("[data-kind=capture] pre").text_content()


def test_without_scripts_passes_and_charts_can_still_be_read(
    show: Callable[..., Any], decoder: CompileReport
) -> None:
    page = show(decoder, java_script_enabled=False)
    assert len(shown_passes(page)) == 1 + len(decoder.passes)
    page.locator("summary", has_text="fuse-attention").click()
    assert page.locator(".replaced", has_text="attention(").first.is_visible()
    assert page.get_by_text("The page's script did not run").is_visible()
