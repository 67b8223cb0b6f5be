"""The strict params loader and the command line built on it."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from stages.common import entry, params
from stages.common.params import Between, Count, ParamError, Share, load

GOOD = """
profiles: [cpu]
benchmarks: [a, b]
cpu:
  device: {name: cpu, dtype: float32, threads: 1}
  models: {}
  train:
    lr: 1.0e-3
    steps: 10
    share: 1
    name: sgd
    limit: null
    sizes: [1, 2]
    by_name: {x: 0.5, y: 2}
    source: {source: file, path: a.jsonl}
    nested: {low: 1, high: 2}
"""


@dataclass(frozen=True, kw_only=True)
class Nested:
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}; swap them")


@dataclass(frozen=True, kw_only=True)
class FromFile:
    source: Literal["file"]
    path: str
    mode: Literal["text", "bytes"] = "text"


@dataclass(frozen=True, kw_only=True)
class FromWheel:
    source: Literal["pypi"]
    wheel: str


@dataclass(frozen=True, kw_only=True)
class Train:
    lr: Annotated[float, Between(0, 1)]
    steps: Count
    share: Share
    name: Literal["sgd", "adam"]
    limit: int | None
    sizes: tuple[int, ...]
    by_name: dict[str, float]
    source: FromFile | FromWheel
    nested: Nested


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(GOOD)
    return tmp_path


def edit(folder, old, new):
    assert old in GOOD
    (folder / "params.yaml").write_text(GOOD.replace(old, new))


def test_builds_every_kind_of_value(folder, monkeypatch):
    monkeypatch.setattr(params, "READ", set())
    train = load(Train, "cpu", "train")
    assert train == Train(
        lr=1e-3,
        steps=10,
        share=1.0,
        name="sgd",
        limit=None,
        sizes=(1, 2),
        by_name={"x": 0.5, "y": 2.0},
        source=FromFile(source="file", path="a.jsonl"),
        nested=Nested(low=1, high=2),
    )
    assert type(train.share) is float
    leaves = {"lr", "steps", "share", "name", "limit", "sizes", "by_name.x", "by_name.y"}
    leaves |= {"source.source", "source.path", "nested.low", "nested.high"}
    assert {f"cpu.train.{leaf}" for leaf in leaves} == params.READ


def test_an_empty_list_is_a_value_that_was_read(folder, monkeypatch):
    monkeypatch.setattr(params, "READ", set())
    edit(folder, "sizes: [1, 2]", "sizes: []")
    assert load(Train, "cpu", "train").sizes == ()
    assert "cpu.train.sizes" in params.READ


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("lr: 1.0e-3", "lr: '1e-4'", "cpu.train.lr"),
        ("lr: 1.0e-3", "lr: true", "cpu.train.lr"),
        ("lr: 1.0e-3", "lr: .inf", "cpu.train.lr"),
        ("lr: 1.0e-3", "lr: .nan", "cpu.train.lr"),
        ("lr: 1.0e-3", "lr: 2", "cpu.train.lr"),
        ("lr: 1.0e-3", "lr: 1.0e-3\n    rl: 1", "cpu.train.rl"),
        ("    lr: 1.0e-3\n", "", "cpu.train.lr"),
        ("steps: 10", "steps: 10.0", "cpu.train.steps"),
        ("steps: 10", "steps: true", "cpu.train.steps"),
        ("steps: 10", "steps: 0", "cpu.train.steps"),
        ("steps: 10", "steps: null", "cpu.train.steps"),
        ("steps: 10", "steps: 10\n    steps: 11", "steps"),
        ("share: 1", "share: -0.1", "cpu.train.share"),
        ("name: sgd", "name: adamw", "cpu.train.name"),
        ("name: sgd", "name: no", "cpu.train.name"),
        ("limit: null", "limit: x", "cpu.train.limit"),
        ("sizes: [1, 2]", "sizes: 1", "cpu.train.sizes"),
        ("sizes: [1, 2]", "sizes: [1, b]", "cpu.train.sizes[1]"),
        ("{x: 0.5, y: 2}", "{x: 0.5, y: q}", "cpu.train.by_name.y"),
        ("{x: 0.5, y: 2}", "[1]", "cpu.train.by_name"),
        ("source: file, path: a.jsonl", "source: hub, path: a.jsonl", "cpu.train.source"),
        ("source: file, path: a.jsonl", "source: pypi, path: a.jsonl", "cpu.train.source.path"),
        ("source: file, path: a.jsonl", "source: file, path: a.jsonl, mode: hex", "cpu.train.source.mode"),
        ("source: file, path: a.jsonl", "path: a.jsonl", "cpu.train.source"),
        ("{low: 1, high: 2}", "{low: 3, high: 2}", "cpu.train.nested"),
        ("{low: 1, high: 2}", "3", "cpu.train.nested"),
        ("  train:", "  trian:", "cpu.train"),
    ],
)
def test_names_file_and_key(folder, old, new, key):
    edit(folder, old, new)
    with pytest.raises(ParamError) as caught:
        load(Train, "cpu", "train")
    assert "params.yaml" in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize("form", ["1e-4", "1.0e-4", "0.0001"])
def test_number_forms_agree(folder, form):
    edit(folder, "lr: 1.0e-3", f"lr: {form}")
    assert load(Train, "cpu", "train").lr == 1e-4


def test_missing_and_broken_file(folder):
    with pytest.raises(ParamError, match=r"other\.yaml: not found"):
        load(Train, "cpu", path="other.yaml")
    (folder / "params.yaml").write_text("a: [1,")
    with pytest.raises(ParamError, match="line"):
        load(Train, "a")


def start(argv, main=lambda run: None, **words):
    entry.run(main, argv=argv, compute=False, **words)


def test_entry_hands_over_identity(folder):
    seen = []
    start(["cpu", "b"], seen.append, what=lambda profile: params.keys_at("benchmarks"))
    assert (seen[0].profile, seen[0].what) == ("cpu", "b")
    assert seen[0].device() == entry.Device(name="cpu", dtype="float32", threads=1)


@pytest.mark.parametrize(("argv", "said"), [([], "cpu"), (["cpuu", "a"], "cpu"), (["cpu", "c"], "a, b")])
def test_entry_lists_what_is_accepted(folder, capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        start(argv, what=lambda profile: params.keys_at("benchmarks"))
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_entry_prints_one_line_for_a_users_mistake(folder, capsys):
    def main(run):
        raise ValueError("x.jsonl: line 3: not JSON; fix the line")

    with pytest.raises(SystemExit) as caught:
        start(["cpu"], main)
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: x.jsonl: line 3: not JSON; fix the line\n"


def test_entry_lets_bugs_through(folder):
    def main(run):
        raise KeyError("bug")

    with pytest.raises(KeyError):
        start(["cpu"], main)
