"""Drafters of other sizes: adapt's own recipe, other layers."""

import json
from pathlib import Path

import pytest

from stages.adapt.__main__ import main as adapt
from stages.common import entry, params, store, studies
from stages.common.contexts import write_index, write_shard
from stages.common.tiny import save_tiny
from stages.sizes.__main__ import main
from tests.stages.scripted import cached_rows, causal_lm, prompt_of, tiny_verifier

TRAINING = {
    "steps": 3,
    "sequences": 2,
    "accumulation": 1,
    "windows": 2,
    "window": 3,
    "max_tokens": 40,
    "optimizer": "adamw",
    "lr": 0.003,
    "lr_other": 0.003,
    "weight_decay": 0.0,
    "warmup": 0.1,
    "final_lr": 0.1,
    "clip": 1.0,
    "full_mask_share": 0.7,
    "evaluate_every": 3,
    "checkpoint_every": 2,
}
SIZES = {"whole": {"layers": [0, 1]}, "one": {"layers": [1]}, "none": {"layers": []}, "absent": {"layers": [0, 7]}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Ten texts, what a tiny verifier cached of them, and the drafter that adapt makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("sizes"))
        save_tiny(store.verifier_folder("p"), causal_lm(copy=6))
        texts = {f"c/{number}": prompt_of(18, seed=number) for number in range(10)}
        rows = [
            {"id": name, "prompt_ids": ids[:6], "output_ids": ids[6:], "finish_reason": "length", "temperature": 0.0}
            for name, ids in texts.items()
        ]
        rows = [row | {"seed": 3} for row in rows]
        store.write_parquet(store.trajectories_file("p"), rows, store.TRAJECTORIES, {})
        folder = store.contexts_folder("p")
        folder.mkdir(parents=True)
        shard = {name: cached_rows(tiny_verifier(), ids, [0, 1]) for name, ids in texts.items()}
        write_shard(folder / "0.safetensors", shard)
        write_index(folder, [0, 1], dict.fromkeys(texts, "0.safetensors"))
        section = {"layers": [0, 1], "prefix": "verifier", "draft_vocab": 90, "training": TRAINING}
        profile = {"models": {}, "device": {"name": "cpu", "dtype": "float32", "threads": 1}, "adapt": section}
        profile |= {"validation": {"share": 0.4, "windows": 2, "tree_nodes": 3}, "sizes": SIZES}
        Path(params.PARAMS).write_text(json.dumps({"seed": 3, "sizes": list(SIZES), "p": profile}))
        adapt(entry.Run(profile="p", words={}))
        yield


def grown(size):
    main(entry.Run(profile="p", words={"size": size}))
    folder = studies.size_folder("p", size)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_adapts_own_layers_give_adapts_own_drafter(place):
    """Beyond the layers nothing differs: words, windows, order of texts, steps."""
    found = grown("whole")
    wanted = {file.name: file.read_bytes() for file in store.drafter_folder("p", "adapt").iterdir()}
    assert set(found) == set(wanted)
    assert found["model.safetensors"] == wanted["model.safetensors"]
    cards = [json.loads(files["drafter.json"]) for files in (found, wanted)]
    assert all(card["provenance"].pop("command") for card in cards)
    assert cards[0] == cards[1]
    assert store.curves_file("p", "size_whole").read_text() == store.curves_file("p", "adapt").read_text()


def test_another_size_keeps_the_layers_it_names(place):
    card = json.loads(grown("one")["drafter.json"])
    whole = json.loads((store.drafter_folder("p", "adapt") / "drafter.json").read_text())
    assert (card["layers"], whole["layers"]) == ([1], [0, 1])
    assert card["parameters"] < whole["parameters"]
    assert card["draft_vocab_size"] == whole["draft_vocab_size"]
    assert not [file for file in Path("data/scratch").rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("none", r"p\.sizes\.none\.layers: empty"),
        ("absent", r"p\.sizes\.absent\.layers: the trajectories kept .* not of \[7\]; add them to trajectories"),
    ],
)
def test_layers_that_cannot_be_kept_are_named(place, size, message):
    with pytest.raises(ValueError, match=message):
        grown(size)
