"""Distill: every objective has METHOD.md's gradient; a section says which one it is, or is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from kernels import objectives
from stages.code.imports import ROOT
from stages.common import params
from stages.common.params import ParamError
from stages.distill.__main__ import loss_of
from stages.distill.sections import HARD, REPEAT, SECTIONS, Dpace, Plain, Soft, TrieStreak, read_section

SETTINGS = {Plain: Plain(), TrieStreak: TrieStreak(drafts=4), Dpace: Dpace(smoothing=0.5)}
WINDOWS, G = 5, 3


def test_every_objective_can_be_trained():
    assert set(HARD) == set(objectives.NAMES)


@pytest.mark.parametrize("name", objectives.NAMES)
def test_the_loss_has_the_weights_of_its_objective(name):
    g = torch.Generator().manual_seed(1)
    log_q_WG = torch.log(0.2 + 0.7 * torch.rand(WINDOWS, G, generator=g)).requires_grad_()
    valid_WG = torch.ones(WINDOWS, G, dtype=torch.bool)
    settings = SETTINGS[HARD[name][0]]
    loss_of(name, settings)(log_q_WG, valid_WG, torch.ones(WINDOWS, G)).backward()
    expected = objectives.weights(name, log_q_WG.detach(), valid_WG, **settings.settings())
    assert log_q_WG.grad is not None
    torch.testing.assert_close(-log_q_WG.grad * WINDOWS, expected)


def test_dpace_without_smoothing_is_streak():
    log_q_WG = torch.log(torch.rand(WINDOWS, G, generator=torch.Generator().manual_seed(2)))
    valid_WG = torch.ones(WINDOWS, G, dtype=torch.bool)
    gradients = []
    for name, settings in (("dpace", Dpace(smoothing=0.0)), ("streak", Plain())):
        x = log_q_WG.clone().requires_grad_()
        loss_of(name, settings)(x, valid_WG, torch.ones(WINDOWS, G)).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


# Sections ---------------------------------------------------------------------------------------------------


@pytest.fixture
def reading(tmp_path, monkeypatch):
    """Reads a section of profile `tiny` as it stands in params.yaml."""
    monkeypatch.chdir(tmp_path)

    def read(name, section):
        Path("params.yaml").write_text(json.dumps({"tiny": {"distill": {name: section}}}))  # JSON is YAML
        return read_section("tiny", name)

    return read


@pytest.mark.parametrize(
    ("name", "section", "objective", "read"),
    [
        ("streak", {}, "streak", Plain()),
        ("trie_streak", {"drafts": 16}, "trie_streak", TrieStreak(drafts=16)),
        ("streak", {"objective": "streak"}, "streak", Plain(objective="streak")),
        (
            "few",
            {"objective": "trie_streak", "drafts": 4},
            "trie_streak",
            TrieStreak(objective="trie_streak", drafts=4),
        ),
        ("dpace_a0", {"objective": "dpace", "smoothing": 0}, "dpace", Dpace(objective="dpace", smoothing=0.0)),
        ("first_s2", {"objective": "first", "seed": 2}, "first", Plain(objective="first", seed=2)),
        ("soft", {"temperature": 0.5}, "soft", Soft(temperature=0.5)),
    ],
)
def test_a_section_says_which_objective_it_is(reading, name, section, objective, read):
    found = reading(name, section)
    assert found == (objective, read)
    assert type(found[1]) is SECTIONS[objective]
    assert found[1].said() == section
    assert set(found[1].settings()) == set(section) - {"objective", "seed"}


@pytest.mark.parametrize(
    ("name", "section", "error"),
    [
        ("few", {"drafts": 4}, r"distill\.few\.objective: missing; .* one of masked_ce, .*, dpace, soft"),
        ("few", {"objective": "trie"}, r"distill\.few\.objective: 'trie' is none of masked_ce, "),
        ("streak", {"objective": "first"}, r"streak\.objective: 'first' under the name of another objective"),
        ("few", {"objective": "trie_streak"}, r"distill\.few\.drafts: missing"),
        ("streak", {"drafts": 4}, r"distill\.streak\.drafts: unknown; known here: objective, seed"),
        ("streak", None, r"distill\.streak: None is not a section"),
        ("streak", {"objective": ["streak"]}, r"distill\.streak\.objective: \['streak'\] is none of"),
        ("dpace", {"smoothing": 2.0}, r"distill\.dpace\.smoothing: 2\.0 is out of range"),
        ("soft", {"temperature": 0.0}, r"distill\.soft\.temperature: 0\.0 is out of range"),
        ("soft", {}, r"distill\.soft\.temperature: missing"),
        ("streak", {"seed": 1}, r"distill\.streak\.seed: 1 in a section of this name; .* <name>_s<seed>"),
        ("streak_s1", {"objective": "streak"}, r"distill\.streak_s1\.seed: None in a section of this name"),
        ("streak_s1", {"objective": "streak", "seed": 2}, r"distill\.streak_s1\.seed: 2 in a section of this name"),
        ("streak_s1", {"objective": "streak", "seed": -1}, r"streak_s1\.seed: -1 is out of range"),
    ],
)
def test_what_a_section_cannot_say(reading, name, section, error):
    with pytest.raises(ParamError, match=error):
        reading(name, section)


def test_a_name_without_a_section_lists_those_there_are(reading):
    reading("streak", {})
    with pytest.raises(ParamError, match=r"tiny\.distill\.strek: missing; found here: streak"):
        read_section("tiny", "strek")


@pytest.mark.parametrize("profile", ["smoke", "cpu", "cpu_long"])
def test_the_projects_sections_can_be_read_and_seeds_change_nothing_else(profile, monkeypatch):
    document = YAML(typ="safe").load(ROOT / "params.yaml")
    monkeypatch.setattr(params, "_document", lambda path: document)  # parsed once, not for every key
    names = [*document[profile]["distill"]]
    names.remove("training")
    found = {name: read_section(profile, name) for name in names}
    assert {objective for objective, _ in found.values()} == set(SECTIONS)
    repeats = {name: repeat for name in names if (repeat := REPEAT.fullmatch(name))}
    assert {int(repeat["seed"]) for repeat in repeats.values()} == {1, 2}
    for name, repeat in repeats.items():
        objective, section = found[repeat["name"]]
        assert (objective, section.settings()) == (found[name][0], found[name][1].settings())
