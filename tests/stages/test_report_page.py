"""report.html by a parser: it stands alone, no id twice, every figure has its words, nothing is of fixed width."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from stages.report import markup, page

VOID = ("meta", "br", "hr", "img", "link")


class Page(HTMLParser):
    """Tags that stay open, requests, ids, and each element with its attributes and the open elements around it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.requests: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given, tuple(self.open)))
        if tag not in VOID:
            self.open.append(f"{tag}.{given.get('class') or ''}")
        if given.get("id"):
            self.ids.append(str(given["id"]))
        self.requests += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop().split(".")[0] == tag

    def all(self, tag: str) -> list[tuple[dict[str, str | None], tuple[str, ...]]]:
        return [(given, around) for name, given, around in self.elements if name == tag]


@pytest.fixture(scope="module")
def text(made: Path) -> str:
    return (made / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(text: str) -> Page:
    return Page(text)


def test_it_stands_alone(text: str, parsed: Page) -> None:
    assert "http" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert not parsed.requests
    assert not parsed.open


def test_ids_are_unique_and_every_reference_has_its_target(text: str, parsed: Page) -> None:
    assert len(parsed.ids) == len(set(parsed.ids)), "figures must not share ids"
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    used |= {str(given[name]) for given, _ in parsed.all("svg") for name in ("aria-labelledby", "aria-describedby")}
    assert used
    assert used <= set(parsed.ids), "a clip path, marker or link lost its target"


def test_every_figure_has_a_title_a_description_and_a_caption(text: str, parsed: Page) -> None:
    figures = parsed.all("svg")
    assert len(figures) == 7
    assert all(given["role"] == "img" for given, _ in figures)
    for tag in ("title", "desc", "figcaption"):
        inside = [around for _, around in parsed.all(tag) if around[-1].startswith(("svg", "figure"))]
        assert len(inside) == 7, tag
    assert re.search(r'<title id="window-title">By &lt;window&gt;</title><desc id="window-desc">A line.</desc>', text)


def test_what_may_be_wide_scrolls_in_a_box_of_its_own(text: str, parsed: Page) -> None:
    for tag in ("table", "svg"):
        assert parsed.all(tag)
        assert all(around[-1] == "div.scroll" for _, around in parsed.all(tag)), tag
    boxes = [given for given, _ in parsed.all("div") if given.get("class") == "scroll"]
    assert all(given["tabindex"] == "0" and given["aria-label"] for given in boxes)
    assert not [given for tag in ("svg", "table", "div", "figure") for given, _ in parsed.all(tag) if "width" in given]
    style = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8")
    outside = re.sub(r"(figure svg|td\.long) \{[^}]*\}", "", style)  # these stand in a box that scrolls
    assert not re.search(r"(?<!max-)(?<![a-z-])(min-)?width: *[\d.]+(px|rem|em|pt)", outside.replace("0.7em", ""))


def test_every_table_sorts_by_numbers_where_it_has_them(parsed: Page) -> None:
    assert all(given["class"] == "sortable" for given, _ in parsed.all("table"))
    assert {given["data-kind"] for given, _ in parsed.all("th")} == {"text", "number"}


def test_a_cell_sorts_by_the_number_it_begins_with() -> None:
    frame = pd.DataFrame({"a": ["1.50 (0.61)", "n/a", "12 [9, 15]"], "b": ["x 1", "2", "3"], "c": [1, 2, 3]})
    text = markup.table(frame, label="t", best=("a",))
    assert re.findall(r'data-kind="(\w+)"', text) == ["number", "text", "number"]
    assert '<td class="number best" data-value="12">12 [9, 15]</td>' in text
    assert '<td class="number">n/a</td>' in text
    assert text.count("best") == 1


def test_sections_are_listed_and_the_study_is_among_them(text: str) -> None:
    listed = re.findall(r'<li><a href="#(\w+)">', text)
    assert listed == re.findall(r'<section id="(\w+)">', text)
    assert listed.index("study_of_windows") < listed.index("figures")
    assert "<p>Two &amp; a half.</p>" in text
    assert "Not drawn: no step." in text
    assert text.count(">Windows</h") == 1, "a table called like its section has no second heading"


def test_published_numbers_stand_beside_their_figure(text: str) -> None:
    beside = text.index('aria-label="Figure 2"')
    assert text.index('id="acceptance_training-title"') < beside < text.index('id="histogram-title"')
    assert "j = 32" in text[beside:]
