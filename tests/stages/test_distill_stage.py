"""The stage on a tiny model: old sections and variants, other seeds, kill and resume, the clock."""

import contextlib
import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels import objectives
from stages.common import entry, store, training, windows
from stages.common.drafters import DrafterCard, load_drafter, prune, save_drafter
from stages.common.features import FINAL, features_folder, write_index, write_shard
from stages.common.models import config_digest, load_causal_lm, load_verifier
from stages.common.params import load
from stages.common.tiny import VOCABULARY, build_tiny, save_tiny
from stages.common.tokenizers import load_tokenizer
from stages.common.training import Training
from stages.common.validation import Validation
from stages.distill import stopwatch
from stages.distill.__main__ import main
from stages.distill.stopwatch import Stopwatch
from stages.evaluate.methods.vanilla import Vanilla
from stages.features.__main__ import read
from tests.stages.scripted import engine_of, prompt_of

G, STEPS = 3, 4
TRAINING = {
    "steps": STEPS,
    "sequences": 2,
    "accumulation": 2,
    "windows": 3,
    "window": G,
    "max_tokens": 64,
    "optimizer": "muon",
    "lr": 0.02,
    "lr_other": 0.003,
    "weight_decay": 0.0,
    "warmup": 0.0,
    "final_lr": 0.1,
    "clip": 1.0,
    "full_mask_share": 1.0,
    "evaluate_every": 2,
    "checkpoint_every": 1,
}
DISTILL = {
    "training": TRAINING,
    "streak": {},
    "trie_streak": {"drafts": 16},
    "trie_streak_k4": {"objective": "trie_streak", "drafts": 4},
    "dpace_a0": {"objective": "dpace", "smoothing": 0.0},
    "streak_s1": {"objective": "streak", "seed": 1},
    "soft": {"temperature": 1.0},
}
HARD = [name for name in DISTILL if name not in ("training", "soft")]
PARAMS = {
    "seed": 0,
    "objectives": HARD,
    "soft_objectives": ["soft"],
    "tiny": {
        "device": {"name": "cpu", "dtype": "float32", "threads": 1},
        "models": {},
        "validation": {"share": 0.3, "windows": 2, "tree_nodes": 4},
        "distill": DISTILL,
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny verifier, its greedy texts and hidden states, and the drafter that `adapt` would leave."""
    root = tmp_path_factory.mktemp("tiny")
    with contextlib.chdir(root):
        Path("params.yaml").write_text(json.dumps(PARAMS))  # JSON is YAML
        folder = store.verifier_folder("tiny")
        save_tiny(folder, build_tiny("llama", seed=1))
        verifier, rows = load_verifier(folder, dtype=torch.float32, packed=False), []
        for number in range(8):
            prompt = prompt_of(4 + number % 3, seed=number)
            text = engine_of(verifier, limit=9).decode(prompt, Vanilla(), prompt_id=f"t/{number}")
            row = {"id": f"t/{number}", "prompt_ids": prompt, "output_ids": text.output_ids, "finish_reason": "length"}
            rows.append(row | {"temperature": 0.0, "seed": 0})
        store.write_parquet(store.trajectories_file("tiny"), rows, store.TRAJECTORIES, {})
        states = features_folder("tiny")
        write_shard(states / "0.safetensors", {row["id"]: read(verifier, row, [FINAL]) for row in rows})
        write_index(states, [FINAL], {row["id"]: "0.safetensors" for row in rows})
        words = torch.arange(0, VOCABULARY, 2).tolist() + [row["output_ids"][3] for row in rows]
        d2t = torch.tensor(sorted(set(words)))
        drafter = prune(load_causal_lm(folder, torch.float32), layers=[0], d2t=d2t, vocab_size=VOCABULARY)
        with store.replace_folder(store.drafter_folder("tiny", "adapt")) as out:
            save_drafter(out, drafter, card(folder, drafter))
    return root


def card(folder, drafter):
    return DrafterCard(
        kind="masked_window",
        block_size=4,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix="own",
        layers=(0,),
        verifier_tokenizer=load_tokenizer(folder).fingerprint(),
        verifier_config=config_digest(folder),
        vocab_size=VOCABULARY,
        draft_vocab_size=len(drafter.d2t),
        parameters=1234,
        objective="masked_ce",
        provenance={"command": "adapt"},
    )


@pytest.fixture
def place(tiny, monkeypatch):
    monkeypatch.chdir(tiny)
    monkeypatch.setattr("sys.argv", ["stages/distill/__main__.py", "tiny", "name"])


def distil(name):
    """The stage; its drafter folder, file by file."""
    main(entry.Run(profile="tiny", words={"objective": name}))
    return written(name)


def written(name):
    kept = store.checkpoints_folder("tiny", name)
    folders = [store.drafter_folder("tiny", name), *sorted(kept.iterdir())]
    return {f"{folder.name}/{file.name}": file.read_bytes() for folder in folders for file in sorted(folder.iterdir())}


def curve(name):
    return list(csv.DictReader(store.curves_file("tiny", name).read_text().splitlines()))


def without_seconds(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def weights(name):
    state = load_file(store.drafter_folder("tiny", name) / "model.safetensors")
    return torch.cat([value.flatten() for key, value in sorted(state.items()) if key not in ("d2t", "t2d")])


# What is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "own"), [("streak", {}), ("trie_streak", {"drafts": 16})])
def test_an_old_section_has_the_drafter_it_always_had(place, name, own, tmp_path):
    """Weights of training.train by itself, and drafter.json without a word on variants, seeds or clocks."""
    files = distil(name)
    folder, t = store.verifier_folder("tiny"), load(Training, "tiny", "distill", "training")
    start = store.drafter_folder("tiny", "adapt")
    drafter, start_card = load_drafter(
        start,
        embedding=load_causal_lm(folder, torch.float32).get_input_embeddings(),
        tokenizer=load_tokenizer(folder).fingerprint(),
        config=config_digest(folder),
        dtype=torch.float32,
        packed=False,
    )
    for p in drafter.trained():
        p.requires_grad_(True)
    v = load(Validation, "tiny", "validation")
    texts = training.read_texts("tiny", t, v, prefix="own", layers=[0], seed=0)

    def objective(log_q_WG, valid_WG, _):
        return getattr(objectives, name)(log_q_WG, valid_WG, **own)

    rows = training.train(drafter, texts, objective, t, v, seed=0, scratch=tmp_path)
    digests = {**texts.digests, "verifier": store.sha256_folder(folder), "start": store.sha256_folder(start)}
    made = {"command": "python -m stages.distill tiny name", "sha256": digests, "steps": STEPS, "seed": 0, **own}
    wanted = {**vars(start_card), "block_size": G, "objective": name, "provenance": made}
    save_drafter(tmp_path, drafter, DrafterCard(**wanted))
    for file in ("drafter.json", "model.safetensors", "config.json"):
        assert files[f"{name}/{file}"] == (tmp_path / file).read_bytes(), file
    assert set(json.loads(files[f"{name}/drafter.json"])["provenance"]) == {"command", "sha256", "steps", "seed", *own}
    plain = csv.DictReader(training.curve_csv(rows).splitlines())
    assert without_seconds(curve(name)) == list(plain)


def test_a_variant_says_what_it_is_and_is_trained_as_such(place):
    for name in ("streak", "dpace_a0", "trie_streak_k4"):
        distil(name)
    found = json.loads((store.drafter_folder("tiny", "trie_streak_k4") / "drafter.json").read_text())
    assert found["objective"] == "trie_streak_k4"
    assert {"objective": "trie_streak", "drafts": 4, "seed": 0}.items() <= found["provenance"].items()
    start, streak, dpace, few = map(weights, ("adapt", "streak", "dpace_a0", "trie_streak_k4"))
    moved = (streak - start).abs().mean()
    assert (dpace - streak).abs().mean() < 1e-3 * moved, "streak's gradient, step by step"
    assert (few - streak).abs().mean() > 0.05 * moved


def test_another_seed_draws_other_texts_from_the_same_start(place, monkeypatch):
    seen = []

    def train(drafter, texts, objective, t, v, *, seed, scratch, keep, title, dtype):
        start = [p.detach().clone() for p in drafter.trained()]
        order = windows.order(texts.training, sequences=4, seed=seed)
        seen.append((start, texts.training, texts.held_out, [next(order) for _ in range(5)]))
        keep(1)
        return [{"step": 1, "split": "train"}]

    monkeypatch.setattr(training, "train", train)
    distil("streak")
    distil("streak_s1")
    (start, texts, held_out, order), (start_1, texts_1, held_out_1, order_1) = seen
    assert all(torch.equal(a, b) for a, b in zip(start, start_1, strict=True))
    assert (texts, held_out) == (texts_1, held_out_1), "held out by the pipeline's seed"
    assert order != order_1
    found = json.loads((store.drafter_folder("tiny", "streak_s1") / "drafter.json").read_text())
    assert found["provenance"]["seed"] == 1


@pytest.mark.parametrize(
    ("name", "other", "error"),
    [
        ("soft", "objectives", "objectives: 'soft' belongs to soft_objectives"),
        ("streak", "soft_objectives", "soft_objectives: 'streak' belongs to objectives"),
    ],
)
def test_an_objective_in_the_wrong_list_is_refused(place, name, other, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(json.dumps(PARAMS | {"objectives": [], "soft_objectives": [], other: [name]}))
    with pytest.raises(ValueError, match=error):
        distil(name)


# Kill and resume --------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def killed(name, monkeypatch, *, after):
    """Run until `after` micro-batches are through."""
    passes, hidden = [], windows.hidden

    def counted(drafter, batch):
        if drafter.training:
            passes.append(1)
            if len(passes) > after:
                raise Killed
        return hidden(drafter, batch)

    with monkeypatch.context() as patch:
        patch.setattr(windows, "hidden", counted)
        with pytest.raises(Killed):
            distil(name)


@pytest.mark.parametrize("name", ["streak", "soft"])
def test_a_killed_run_ends_as_an_undisturbed_one(place, name, monkeypatch):
    """Killed in the third step and, resumed behind the second, in the fourth; the seconds of both runs count."""
    clock = iter(range(10**6))
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: float(next(clock)))
    files, rows = distil(name), curve(name)
    killed(name, monkeypatch, after=5)
    assert written(name) == files, "what was there stays"
    killed(name, monkeypatch, after=3)
    assert distil(name) == files
    assert without_seconds(curve(name)) == without_seconds(rows)
    assert not list(Path("data/scratch").rglob("*.pt"))
    took = [[float(row["seconds"]) for row in found if row["split"] == "train"] for found in (rows, curve(name))]
    assert took[0] == [2.0, 4.0, 6.0, 8.0], "one tick of this clock for each pass"
    assert took[1] == took[0], "and none for the steps that were lost"


# The clock --------------------------------------------------------------------------------------------------


def test_the_stopwatch_stands_still_while_others_measure(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: now[0])
    model = torch.nn.Linear(2, 2)

    def passes(count, *, seconds, training):
        model.train(training)
        for _ in range(count):
            model(torch.zeros(1, 2))
            now[0] += seconds

    watch = Stopwatch(model, tmp_path, accumulation=2)
    passes(3, seconds=100, training=False)
    passes(4, seconds=1, training=True)
    passes(3, seconds=100, training=False)
    passes(1, seconds=1, training=True)
    watch.close()
    passes(9, seconds=100, training=True)
    assert watch.seconds == {1: 2.0, 2: 4.0}

    torch.save({"step": 1, "weights": [torch.zeros(3)]}, tmp_path / "state.pt")
    again = Stopwatch(model, tmp_path, accumulation=2)
    assert again.seconds == {1: 2.0}, "step 2 was not saved"
    passes(2, seconds=5, training=True)
    passes(1, seconds=100, training=False)
    again.close()
    assert again.seconds == {1: 2.0, 2: 12.0}
    rows = [{"step": 0, "split": "valid"}, *({"step": n, "split": "train"} for n in (1, 2, 3))]
    assert [row.get("seconds") for row in again.timed(rows)] == [None, 2.0, 12.0, None]
