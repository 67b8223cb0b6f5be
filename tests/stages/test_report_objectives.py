"""The study of the objectives from hand-made points: means over seeds, intervals over prompts, against the control."""

import math

import pytest

from stages.common import store
from stages.common.studies import points_file, sweep_folder
from stages.report import objectives, tables
from stages.report.seeds import compare, drafted, once, trained
from tests.stages.test_report_measures import PARAMS, STAMP, record

CHAIN, TREE = {"gamma": 4, "temperature": 0.0}, {"gamma": 4, "nodes": 32, "width": 7}
METHODS = {"specdiff2_train": CHAIN, "specdiff2_tree": TREE}
POINTS = [  # method, drafter, accepted tokens of the cycles of two prompts
    ("specdiff2_train", "masked_ce", [1, 1], [1, 1, 1, 1]),
    ("specdiff2_train", "streak", [2, 2], [1, 1, 2, 2]),
    ("specdiff2_train", "streak_s1", [2, 1], [2, 1, 2, 1]),
    ("specdiff2_train", "first@2", [0, 0], [0, 0, 1, 0]),
    ("specdiff2_tree", "masked_ce", [2, 2], [2, 2, 2, 2]),
    ("specdiff2_tree", "streak", [3, 1], [1, 1, 2, 3]),
]
CURVE = """step,tokens,lr,loss,split,streak,seconds
0,,,,valid,0.9,
1,10,0.1,3.0,train,,2.0
2,20,0.1,2.5,train,,4.0
3,20,0.1,2.5,train,,{end}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def put(number, **stamp):
    """One point as the sweep writes it; its name."""
    method, drafter, *accepted = POINTS[number]
    name = f"method-{method}+drafter-{drafter.replace('@', '_')}"
    rows = [record(i, cycles, method=method, split="seen_template") for i, cycles in enumerate(accepted)]
    section = METHODS[method] | {"drafter": drafter}
    facts = {"benchmark": "gsm_symbolic", "method": method, "stamp": STAMP | stamp, "params": {method: section}}
    store.write_parquet(sweep_folder("cpu", "objectives") / f"{name}.parquet", rows, store.CELLS, facts)
    return name


def put_all():
    names = [put(number) for number in range(len(POINTS))]
    store.write_json(points_file("cpu"), {"objectives": {"title": "Objectives", "points": names}})
    for name, end in {"masked_ce": 6.0, "streak": 9.0, "streak_s1": 6.0, "first": 50.0}.items():
        store.write_text(store.curves_file("cpu", name), CURVE.format(end=end))


def lines():
    found = compare([trained(cell) for cell in objectives.read("cpu")], PARAMS, control="masked_ce", seed=0)
    return {(line.objective, line.draft): line for line in found}


def test_means_over_seeds_and_intervals_over_prompts(place):
    """With two prompts a resample is one of them twice or both: the ends of the interval are the prompts themselves."""
    put_all()
    found = lines()
    assert [*found] == [
        *(("masked_ce", "chain"), ("streak", "chain"), ("first@2", "chain")),
        *(("masked_ce", "tree of 32"), ("streak", "tree of 32")),
    ]
    tokens = found["streak", "chain"].tokens
    first, second = 1 + 10 / 6, 1 + 9 / 6
    assert tokens.value == pytest.approx((first + second) / 2)
    assert (tokens.least, tokens.greatest) == pytest.approx((second, first))
    assert tokens.low == pytest.approx((1 + 6 / 4 + 1 + 6 / 4) / 2), "the second prompt alone, mean of both seeds"
    assert tokens.high == pytest.approx((1 + 4 / 2 + 1 + 3 / 2) / 2)
    speedup = found["first@2", "chain"].speedup
    assert speedup.value == pytest.approx((1 + 1 / 6) * 0.1 / 0.15)
    assert (speedup.low, speedup.high) == pytest.approx((0.1 / 0.15, 1.25 * 0.1 / 0.15))


def test_a_lead_that_one_seed_does_not_share_is_not_told(place, monkeypatch):
    slow = ("specdiff2_train", "streak_s1", [1, 1], [1, 1, 1, 0])
    monkeypatch.setattr(f"{__name__}.POINTS", [*POINTS[:2], slow, *POINTS[3:]])
    put_all()
    assert lines()["streak", "chain"].relative.low > 1
    [study] = objectives.studies("cpu", PARAMS, seed=0)
    assert "every seed: none; behind it: first@2; not told apart from it: 1." in study.lead


def test_against_the_control_drafting_alike(place):
    put_all()
    found = lines()
    for draft in ("chain", "tree of 32"):
        assert tuple(found["masked_ce", draft].relative) == (1, 1, 1)
    relative = found["streak", "chain"].relative
    assert relative.value == pytest.approx((1 + 9.5 / 6) / 2)
    assert (relative.low, relative.high) == pytest.approx(((1 + 6 / 4) / 2, (1 + 3.5 / 2) / 2))
    tree = found["streak", "tree of 32"].relative
    assert (tree.low, tree.value, tree.high) == pytest.approx(((1 + 7 / 4) / 3, (1 + 11 / 6) / 3, 1))


def test_without_the_control_there_is_no_quotient(place):
    put_all()
    found = [
        cell for cell in objectives.read("cpu") if cell.provenance["params"][cell.method]["drafter"] != "masked_ce"
    ]
    for line in compare([trained(cell) for cell in found], PARAMS, control="masked_ce", seed=0):
        assert all(math.isnan(value) for value in line.relative)


def test_the_study_says_what_was_found(place):
    put_all()
    [study] = objectives.studies("cpu", PARAMS, seed=0)
    assert study.lead.startswith("On gsm_symbolic seen_template (in brackets the 95% interval over prompts): ")
    assert "Drafting a chain, streak is the fastest at 1.72 [1.67 to 1.83] times vanilla's speed." in study.lead
    assert (
        "with the whole interval and every seed: streak; behind it: first@2; not told apart from it: 0." in study.lead
    )
    assert "Drafting a tree of 32, masked_ce is the fastest" in study.lead
    assert "with the whole interval and every seed: none; behind it: none; not told apart from it: 1." in study.lead
    assert "masked_ce was continued for 6 s; the others took 0.67 to 1.25 times as long" in study.lead
    [plate], [sheet] = study.plates, study.sheets
    assert plate.svg.startswith("<?xml")
    assert all(name in plate.svg for name in ("masked_ce", "first@2", "tree of 32"))
    assert "streak, chain: 2.58 [2.50 to 2.75], 1.72 [1.67 to 1.83]" in plate.alt
    row = sheet.rows[(sheet.rows["objective"] == "streak") & (sheet.rows["draft"] == "chain")].to_dict("records")[0]
    assert (row["seeds"], row["training seconds"]) == (2, 7.5)
    assert row["speedup"] == pytest.approx((1 + 9.5 / 6) / 1.5)
    text = tables.markdown(sheet.rows)
    assert (
        "| streak | chain | 2 | 2.58 | 2.50 to 2.75 | 2.50 to 2.67 | 1.72 | 1.67 to 1.83 | 1.67 to 1.78 | 1.29 |"
        in text
    )
    assert len(tables.csv(sheet.data).splitlines()) == 1 + len(POINTS), "a line for each drafter, drafting one way"
    again = objectives.studies("cpu", PARAMS, seed=0)[0]
    assert (again.plates, again.lead) == (study.plates, study.lead), "the same bytes"


def test_training_seconds_only_where_every_seed_wrote_them(place):
    put_all()
    store.curves_file("cpu", "streak_s1").unlink()
    store.write_text(store.curves_file("cpu", "masked_ce"), "step,split,loss\n1,train,2.0\n")
    [study] = objectives.studies("cpu", PARAMS, seed=0)
    took = dict(zip(study.sheets[0].rows["objective"], study.sheets[0].rows["training seconds"], strict=True))
    assert took["first@2"] == 4.0, "up to that step"
    assert math.isnan(took["streak"])
    assert math.isnan(took["masked_ce"])
    assert "was continued for" not in study.lead


def test_there_is_no_study_unless_the_sweep_is_measured(place):
    assert objectives.studies("cpu", PARAMS, seed=0) == []
    put_all()
    store.write_json(points_file("cpu"), {"window": {"points": ["a"]}})
    assert objectives.studies("cpu", PARAMS, seed=0) == []


def test_points_of_two_machines_are_refused(place):
    put_all()
    put(1, device="cpu Y")
    with pytest.raises(ValueError, match=r"different machines or versions, .*: dvc repro -f -s sweep@cpu-objectives"):
        objectives.studies("cpu", PARAMS, seed=0)


@pytest.mark.parametrize(
    ("drafter", "name"),
    [("streak", "streak"), ("streak_s1", "streak"), ("trie_streak_k4_s12@6", "trie_streak_k4@6"), ("a_size", "a_size")],
)
def test_seeds_share_a_name(drafter, name):
    assert once(drafter) == name


def test_what_a_method_drafts():
    assert drafted(CHAIN) == drafted(TREE | {"width": 1}) == drafted({"drafts": 1}) == "chain"
    assert drafted(TREE) == "tree of 32"
    assert drafted({"drafts": 4}) == "4 drafts"
