"""The page in a real browser; skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lm_eval_samples import choice_samples, write_lm_eval_folder

from kvbench.reporting import Policy, compare, write_report
from kvbench.runs import load_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no system Chromium (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Opened:
    """A page with everything it complained about and asked for."""

    def __init__(self, browser: Browser, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())


@pytest.fixture
def opened(browser: Browser, full_report: Path) -> Iterator[Opened]:
    page = Opened(browser, full_report / "report.html")
    yield page
    page.context.close()


def column(page: Page, table: str, number: int) -> list[str]:
    return page.locator(f"#{table} > tbody > tr:visible > td:nth-child({number})").all_inner_texts()


def test_no_complaints_and_no_outside_requests(opened: Opened, full_report: Path) -> None:
    opened.page.locator("tr.flip").first.click()
    assert opened.complaints == []
    assert opened.requests == [(full_report / "report.html").as_uri()]


def test_the_answer_is_on_the_first_screen(opened: Opened) -> None:
    for selector in (".lead", ".card >> nth=0", ".badge >> nth=0"):
        box = opened.page.locator(selector).bounding_box()
        assert box is not None
        assert box["y"] + min(box["height"], 200) < 900


def test_the_wide_tables_fit_a_laptop(opened: Opened) -> None:
    for table in ("matrix", "t-target", "t-source", "t-mapper"):
        assert opened.page.evaluate(f"(t => t.scrollWidth - t.clientWidth)(document.getElementById('{table}').parentElement)") == 0, table


def test_tables_sort_by_value(opened: Opened) -> None:
    page = opened.page
    headers = page.locator("#t-target thead button")
    names = [text.strip() for text in headers.all_inner_texts()]
    number = names.index("difference") + 1
    values = lambda: [float(v or "nan") for v in page.locator(f"#t-target tbody td:nth-child({number})").evaluate_all("c => c.map(x => x.dataset.v)")]  # noqa: E731
    headers.nth(number - 1).click()
    assert values() == sorted(values())
    assert page.locator("#t-target th[aria-sort]").get_attribute("aria-sort") == "ascending"
    headers.nth(number - 1).click()
    assert values() == sorted(values(), reverse=True)


def test_tables_filter(opened: Opened) -> None:
    page = opened.page
    before = len(column(page, "t-target", 2))
    page.locator("input[data-filter=t-target]").fill("arc head")
    assert column(page, "t-target", 2) == ["head_local"]
    page.locator("input[data-filter=t-target]").fill("")
    assert len(column(page, "t-target", 2)) == before == 12


def test_flips_filter_sort_and_open(opened: Opened) -> None:
    page = opened.page
    page.select_option("#flip-arm", "head_local")
    page.select_option("#flip-task", "arc_made")
    page.select_option("#flip-outcome", "lost")
    lost = column(page, "flips", 1)
    assert set(lost) == {"▼ lost"}
    assert page.locator("#flip-count").inner_text().startswith(page.evaluate("String(rows().length)"))
    docs = [int(text) for text in column(page, "flips", 3)]
    assert docs == sorted(docs)
    page.locator("#flips thead button").nth(2).click()
    docs = [int(text) for text in column(page, "flips", 3)]
    assert docs == sorted(docs, reverse=True)

    page.locator("tr.flip").first.click()
    detail = page.locator("tr.detail").first
    assert "Which animal is number" in detail.locator("pre").inner_text()
    assert detail.locator("thead th").all_inner_texts() == ["choice", "head_local", "target"]
    assert detail.locator("tr.gold").count() == 1
    assert "(gold)" in detail.locator("tr.gold").inner_text()
    page.locator("tr.flip").first.click()
    assert page.locator("tr.detail").count() == 0


def test_flips_open_by_keyboard_and_show_generated_text(opened: Opened) -> None:
    page = opened.page
    page.select_option("#flip-task", "sums_made")
    page.locator("tr.flip").first.focus()
    page.keyboard.press("Enter")
    text = page.locator("tr.detail").inner_text()
    assert "before the filter" in text
    assert "It is" in text


def test_flips_against_any_arm_and_search(opened: Opened) -> None:
    page = opened.page
    page.select_option("#flip-reference", "ridge")
    assert page.locator("tr.flip").count() == 0
    page.select_option("#flip-reference", "source")
    page.locator("#flip-search").fill("number 17 of arc_made")
    assert set(column(page, "flips", 2)) <= {"arc_made"}


# What a person reads: every text that is shown, its size in pixels after scaling of drawings, and its contrast with its background.
READ = """
() => {
  const luminance = (rgb) => { const [r, g, b] = rgb.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const colour = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const found = [];
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.textContent.trim() || !parent.getClientRects().length || parent.closest("option")) continue;
    const style = getComputedStyle(parent), drawn = parent.closest("svg");
    const scale = drawn ? drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width : 1;
    let behind = parent, back = [0, 0, 0, 0];
    while (behind) { back = colour(getComputedStyle(behind).backgroundColor); if (back.length === 3 || back[3] > 0) break; behind = behind.parentElement; }
    const ink = colour(drawn ? (style.fill === "none" ? style.color : style.fill) : style.color).slice(0, 3);
    const [a, b] = [luminance(ink), luminance(back.slice(0, 3))].sort((x, y) => y - x);
    found.push({ text: node.textContent.trim().slice(0, 40), pixels: parseFloat(style.fontSize) * scale, contrast: (a + 0.05) / (b + 0.05) });
  }
  return found;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_text_is_readable(browser: Browser, full_report: Path, width: int, scheme: str) -> None:
    opened = Opened(browser, full_report / "report.html", width=width, scheme=scheme)
    opened.page.locator("tr.flip").first.click()
    read = opened.page.evaluate(READ)
    assert len(read) > 500
    small = [r for r in read if r["pixels"] < 10.5]
    assert small == []
    # WCAG AA asks 4.5 : 1 of body text.
    assert [r for r in read if r["contrast"] < 4.5] == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    shots = os.environ.get("KVBENCH_SCREENSHOTS")
    if shots:
        opened.page.screenshot(path=f"{shots}/report-{scheme}-{width}.png", full_page=True)
    opened.context.close()


def test_a_page_of_foreign_runs_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    long = tmp_path / ("a_folder_with_a_very_long_name_without_a_single_break_" * 2)
    folders = [write_lm_eval_folder(long / name, {"c": choice_samples("c", 40, level, name)}) for name, level in (("a", 0.8), ("b", 0.5))]
    page = write_report(compare([run for folder in folders for run in load_runs(folder)], Policy(resamples=1000)), tmp_path / "out")
    opened = Opened(browser, page, width=390)
    assert opened.complaints == []
    opened.page.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    opened.context.close()


def test_printing_unfolds_everything(opened: Opened) -> None:
    page = opened.page
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert not page.locator(".controls").first.is_visible()
