"""What other parts of the report hand in: names that can be files, figures that say why they were not drawn."""

import pytest

from stages.report import style, tables
from stages.report.figures import Absent
from stages.report.frames import Frame
from stages.report.study import Plate, Sheet, Study, plate
from tests.stages.reporting import make, set_up, stage, study


def picture():
    figure, [[axes]] = style.sheet(1, 1, width=2, height=1)
    axes.plot([0, 1], [0, 1], **style.line(9))
    return figure


def nothing():
    raise Absent("no point was measured")


def test_a_plate_is_drawn_or_says_what_was_missing() -> None:
    drawn = plate("p", "t", "r", "a", picture)
    assert drawn.svg.startswith("<?xml")
    assert not drawn.missing
    absent = plate("p", "t", "r", "a", nothing)
    assert (absent.svg, absent.missing) == ("", "Not drawn: no point was measured.")


@pytest.mark.parametrize("name", ["Window", "a b", "", "../x", "a-b"])
def test_names_become_files_and_ids(name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        Study(name="s", title="", lead="", plates=[Plate(name=name, title="", reading="", alt="")])


def test_a_study_reaches_page_and_files(made) -> None:
    assert (made / "tables" / "wordy.csv").read_text() == "n\n1.5\n", "the data, not the wording"
    assert (made / "tables" / "window_points.csv").read_text() == "x,y\n1,2\n"
    text = (made / "report.md").read_text()
    assert text.index("## Windows\n\nTwo & a half.\n\n### By <window>") < text.index("## Figures")
    assert "![A line.](figures/window.svg)" in text


def test_two_of_one_name_are_refused(tmp_path, monkeypatch) -> None:
    def twice(profile: str, params, *, seed: int) -> list[Study]:
        [one] = study(profile, params, seed=seed)
        rows: Frame = tables.pd.DataFrame({"a": [1]})
        return [one, Study(name="other", title="", lead="", sheets=[Sheet(name="wide", title="", note="", rows=rows)])]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stage, "studies", twice)
    monkeypatch.setattr(stage.gallery, "plates", lambda report: [])
    set_up(tmp_path)
    with pytest.raises(ValueError, match="two tables are called 'wide'"):
        make()


def test_without_sweeps_there_are_no_studies(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    set_up(tmp_path)
    monkeypatch.setattr(stage.gallery, "plates", lambda report: [])
    text = (make() / "report.html").read_text()
    assert "<section" in text
    assert "study" not in text


def test_lines_differ_without_their_colours() -> None:
    looks = [str(style.line(number)) for number in range(32)]
    assert len(set(looks)) == 32
