"""report.html in headless Chromium: it draws, sorts, fits phone, desktop and paper, and asks for nothing.

Needs playwright (`pip install -e '.[browser]'`) and a Chromium: one on the PATH (Debian: `apt-get install chromium`),
one that SPECDIFF2_CHROMIUM names, or playwright's own (`playwright install chromium`). Skipped with the reason
elsewhere.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[browser]'")
pytestmark = pytest.mark.browser
SCREENS = {"phone": (360, 740), "desktop": (1280, 900)}
PAPER = (1032, 700)  # A4 across at 96 dots an inch, less margins of 12 mm
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OVERFLOW = """() => [...document.querySelectorAll("body *")]
  .filter((e) => !e.closest(INSIDE) && e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((e) => e.tagName + "." + e.getAttribute("class") + " " + e.textContent.slice(0, 40))"""
ORDER = "(table, column) => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent)"


@pytest.fixture(scope="session")  # as `made`, which need not be made where there is no browser
def browser() -> Iterator[Any]:
    with api.sync_playwright() as driver:
        own = driver.chromium.executable_path
        found = os.environ.get("SPECDIFF2_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None) or own
        if not Path(found).exists():
            pytest.skip("no Chromium was found: install one, or name it in SPECDIFF2_CHROMIUM")
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


class Opened:
    """A page, what it printed as an error, and what it asked for."""

    def __init__(self, browser: Any, file: Path, size: tuple[int, int], scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, offline=True
        )
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def table(self, label: str) -> Any:
        return self.page.locator(f'.scroll[aria-label="{label}"] table')

    def column(self, label: str, number: int) -> list[str]:
        return self.table(label).evaluate(f"(table) => ({ORDER})(table, {number})")


@pytest.fixture(params=SCREENS)
def opened(request: pytest.FixtureRequest, browser: Any, made: Path) -> Iterator[Opened]:
    shown = Opened(browser, made / "report.html", SCREENS[request.param])
    yield shown
    shown.context.close()


def test_it_draws_fits_and_is_silent(opened: Opened, made: Path) -> None:
    page = opened.page
    boxes = page.locator("figure svg").evaluate_all(
        """(all) => all.map((e) => {
          const box = e.getBoundingClientRect();
          return [box.width, box.height, e.querySelectorAll("path").length];
        })"""
    )
    assert len(boxes) == 7
    assert all(width > 200 and height > 50 and paths for width, height, paths in boxes), boxes
    drawn = page.locator("#speedup-axes_1").evaluate("(e) => { const b = e.getBBox(); return b.width * b.height; }")
    assert drawn > 100
    assert page.evaluate(OVERFLOW.replace("INSIDE", "'.scroll'")) == []
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert opened.errors == []
    assert opened.requests == [(made / "report.html").as_uri()]


def test_what_is_wider_than_the_screen_scrolls_in_its_box(browser: Any, made: Path) -> None:
    shown = Opened(browser, made / "report.html", SCREENS["phone"])
    box = shown.page.locator('.scroll[aria-label="Windows"]')
    wide = box.evaluate("(e) => [e.scrollWidth, e.clientWidth]")
    assert wide[0] > wide[1]
    box.focus()
    shown.page.keyboard.press("ArrowRight")
    shown.page.wait_for_function("document.activeElement.scrollLeft > 0")
    shown.context.close()


def test_tables_sort_by_click_and_by_keyboard(opened: Opened) -> None:
    heads = opened.table("Wordy").locator("th")
    heads.nth(1).locator("button").click()
    assert opened.column("Wordy", 1) == ["10.5 (1)", "9 (2)", "n/a"]
    assert heads.nth(1).get_attribute("aria-sort") == "descending"
    heads.nth(1).locator("button").focus()
    opened.page.keyboard.press("Enter")
    assert opened.column("Wordy", 1) == ["9 (2)", "10.5 (1)", "n/a"], "what was not measured stays last"
    assert heads.nth(1).get_attribute("aria-sort") == "ascending"
    heads.nth(0).locator("button").focus()
    opened.page.keyboard.press("Space")
    assert opened.column("Wordy", 0) == ["a", "b", "c"], "words from A to Z"
    assert heads.nth(1).get_attribute("aria-sort") is None
    main = "All speed-ups"
    speeds = [float(text) for text in opened.column(main, 3)]
    opened.table(main).locator("th").nth(3).locator("button").click()
    assert [float(text) for text in opened.column(main, 3)] == sorted(speeds, reverse=True) != speeds
    assert opened.errors == []


def test_every_table_can_be_sorted_and_keeps_its_rows(browser: Any, made: Path) -> None:
    shown = Opened(browser, made / "report.html", SCREENS["desktop"])
    lost = shown.page.locator("table").evaluate_all(
        """(tables) => tables.filter((table) => {
          const rows = () => [...table.rows].map((row) => row.textContent).sort().join("|");
          const before = rows();
          const buttons = [...table.querySelectorAll("th button")];
          for (const button of buttons) { button.click(); button.click(); }
          return buttons.length !== table.rows[0].cells.length || rows() !== before;
        }).map((table) => table.parentElement.ariaLabel)"""
    )
    assert lost == []
    assert shown.errors == []
    shown.context.close()


def test_it_prints_on_a_sheet(browser: Any, made: Path) -> None:
    shown = Opened(browser, made / "report.html", PAPER)
    shown.page.emulate_media(media="print")
    assert shown.page.evaluate(OVERFLOW.replace("INSIDE", "'svg'")) == []
    assert shown.page.pdf()[:5] == b"%PDF-"
    shown.context.close()


def test_in_the_dark_figures_are_light_on_dark(browser: Any, made: Path) -> None:
    shown = Opened(browser, made / "report.html", SCREENS["desktop"], "dark")
    paper = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(20, 24, 29)"
    inks = shown.page.locator("figure svg text").evaluate_all("(all) => all.map((e) => getComputedStyle(e).fill)")
    assert inks
    assert set(inks) == {"rgb(230, 237, 243)"}
    shown.context.close()
