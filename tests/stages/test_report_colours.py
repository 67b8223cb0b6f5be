"""The palette of params.yaml on the page's two papers: everything drawn can be seen, and no two methods look alike."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML

from stages.report import page, style

ROOT = Path(__file__).parents[2]
COLOURS = YAML(typ="safe").load(ROOT / "params.yaml")["report"]["colours"]
PAPERS = re.findall(r"--paper: (#[0-9a-f]{6})", (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8"))
SIGHT = {  # linear RGB as seen with a whole and with a missing cone (Machado and others 2009, severity 1)
    "all cones": np.eye(3),
    "no M cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no L cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}


def linear(colour: str) -> np.ndarray:
    """Linear RGB in 0..1 of '#rrggbb' (sRGB)."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """Contrast of WCAG 2: 1 is none, 21 black on white."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def perceived(colour: str, sight: np.ndarray) -> np.ndarray:
    """OKLab of a colour as some eyes see it."""
    lms = np.cbrt(
        np.array(
            [
                [0.4122214708, 0.5363325363, 0.0514459929],
                [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005],
            ]
        )
        @ np.clip(sight @ linear(colour), 0, 1)
    )
    return (
        np.array(
            [
                [0.2104542553, 0.7936177850, -0.0040720468],
                [1.9779984951, -2.4285922050, 0.4505937099],
                [0.0259040371, 0.7827717662, -0.8086757660],
            ]
        )
        @ lms
    )


def test_there_are_a_light_and_a_dark_paper() -> None:
    assert PAPERS[0] == style.PAPER
    assert contrast(PAPERS[0], PAPERS[1]) > 15
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("section", ["methods", "trainings", "phases"])
def test_every_colour_is_seen_on_both_papers(section: str) -> None:
    """3 to 1 is what WCAG asks of graphics."""
    faint = {
        name: [round(contrast(colour, paper), 2) for paper in PAPERS[:2]]
        for name, colour in COLOURS[section].items()
        if min(contrast(colour, paper) for paper in PAPERS[:2]) < 3
    }
    assert not faint


@pytest.mark.parametrize("sight", SIGHT)
def test_methods_are_told_apart(sight: str) -> None:
    """Markers, dashes and names tell them apart without any colour; with it, no two of them are one."""
    seen = {name: perceived(colour, SIGHT[sight]) for name, colour in COLOURS["methods"].items()}
    near = {
        pair: round(float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])), 3) for pair in itertools.combinations(seen, 2)
    }
    least = 0.06 if sight == "all cones" else 0.035
    assert not {pair: distance for pair, distance in near.items() if distance < least}


def test_a_training_wears_the_colour_of_the_method_it_is_for() -> None:
    both = {name for name in COLOURS["trainings"] if name in COLOURS["methods"]}
    assert {"eagle3", "medusa", "hydra", "first", "distillspec"} <= both
    assert all(COLOURS["trainings"][name] == COLOURS["methods"][name] for name in both)
