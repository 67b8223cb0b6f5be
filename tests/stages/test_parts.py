"""What a cell is put together from: a method gets the kind of drafter it drafts with, or says why not."""

import json
from typing import Any, cast

import pytest

from stages.common import store
from stages.evaluate.parts import HEADS, WINDOW, method_drafter, method_module
from tests.stages.scripted import tiny_verifier


@pytest.mark.parametrize(
    ("method", "kind", "wanted"),
    [
        ("eagle3", "eagle", "eagle3"),
        ("hydra", "medusa", "hydra"),
        ("specdiff2", "causal", WINDOW),
        ("speculative", WINDOW, "causal"),
        ("specdiff2_mix", "fed", WINDOW),
    ],
)
def test_a_drafter_of_another_kind_is_refused(method, kind, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = store.drafter_folder("p", "some")
    folder.mkdir(parents=True)
    (folder / "drafter.json").write_text(json.dumps({"kind": kind}))
    pinned = {"method": method, "drafter": "some", "folder": folder.as_posix(), "sha256": store.sha256_folder(folder)}
    store.write_json(store.manifest_file("p", method), pinned)
    with pytest.raises(ValueError, match=rf"p\.evaluate\.{method}\.drafter: 'some' is of kind '{kind}'.*'{wanted}'"):
        method_drafter("p", method, tiny_verifier(), cast(Any, None), cast(Any, None))


def test_heads_are_known_by_their_own_kind():
    assert {kind: head.kind for kind, head in HEADS.items()} == {kind: kind for kind in HEADS}
    wanted = {getattr(method_module(name), "KIND", WINDOW) for name in ("dyspec", "eagle2", "specdiff2_fed", "first")}
    assert wanted == {"causal", "eagle", "fed", WINDOW}
