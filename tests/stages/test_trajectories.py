"""The stage: contract of the output, errors, and a killed run that goes on with the same bytes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stages.common import entry, params, scratch, store
from stages.common.contexts import Contexts
from stages.common.decode import decode_batch
from stages.common.models import load_verifier, resolve_dtype
from stages.common.tiny import build_tiny, save_tiny
from stages.common.tokenizers import load_tokenizer
from stages.trajectories import write
from stages.trajectories.__main__ import main
from tests.stages.scripted import cached_rows

ROOT = Path(__file__).parents[2]
SECTION = {
    "temperature": 0.8,
    "top_k": 0,
    "top_p": 1.0,
    "max_new_tokens": 8,
    "batch_size": 3,
    "shard_size": 4,
    "keep_layers": [1],
}
TEXTS = [f"{'word ' * (i * 5 % 7)}question {i}" for i in range(14)]
RUN = entry.Run(profile="tiny", words={})

# Folders and numbers n: a run in each folder that ends itself, without any clean-up, as it puts its n-th file in place.
KILLED = """
import os, signal, sys
from stages.common import entry, store
from stages.trajectories.__main__ import main

whole, left = os.replace, 0

def replace(*paths):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    whole(*paths)

store.os.replace = replace
for folder, moment in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        left = int(moment)
        entry.run(main, argv=["tiny"])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, folder
"""


def write_corpus(texts, ids=None):
    rows = [
        {"id": name, "split": "train", "turns": [text], "reference": None, "category": "x", "prompt_sha256": "-"}
        for name, text in zip(ids or [f"c/{i}" for i in range(len(texts))], texts, strict=True)
    ]
    store.write_parquet(store.corpus_file("tiny"), rows, store.PROMPTS, {})


def write_params(**changes):
    device = {"name": "cpu", "dtype": "float32", "threads": 1}
    tiny = {"device": device, "models": {}, "trajectories": SECTION | changes}
    Path(params.PARAMS).write_text(json.dumps({"seed": 3, "tiny": tiny}))  # JSON is YAML


def prepare():
    save_tiny(store.verifier_folder("tiny"), build_tiny("llama", seed=1))
    write_corpus(TEXTS)
    write_params()


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare()
    return tmp_path


def output():
    """Everything the stage writes, by name."""
    folder = store.contexts_folder("tiny")
    return {path.name: path.read_bytes() for path in [store.trajectories_file("tiny"), *folder.iterdir()]}


def shards():
    return sorted(Path("data/scratch").rglob("*.parquet"))


def interrupted(monkeypatch, *, after):
    """Run until `after` shards are decoded, then Ctrl-C."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return decode_batch(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(write, "decode_batch", counted)
        try:
            main(RUN)
        except KeyboardInterrupt:
            return
    raise AssertionError("the run was not interrupted")


def test_output_follows_the_contract(place):
    main(RUN)
    rows = store.read_parquet(store.trajectories_file("tiny"), store.TRAJECTORIES)
    folder = store.verifier_folder("tiny")
    tokenizer = load_tokenizer(folder)
    verifier = load_verifier(folder, dtype=resolve_dtype("float32", "cpu"))
    assert [row["id"] for row in rows] == [f"c/{i}" for i in range(len(TEXTS))], "the corpus's own order"
    for row, text in zip(rows, TEXTS, strict=True):
        assert row["prompt_ids"] == tokenizer.encode_prompt([text])
        (alone,) = decode_batch(
            verifier,
            [row["prompt_ids"]],
            keys=[row["id"]],
            seed=3,
            temperature=0.8,
            max_new_tokens=8,
            batch_size=1,
        )
        assert (row["output_ids"], row["finish_reason"]) == alone[:2]
        assert (row["temperature"], row["seed"]) == (0.8, 3)
    provenance = store.read_provenance(store.trajectories_file("tiny"))
    assert provenance["params"] == SECTION
    assert provenance["stamp"]["dtype"] == "float32"
    assert not shards(), "the resume state goes once the output is there"


# The file being put in place: the third shard's contexts, the shard itself, the index of contexts, the trajectories.
KILLS = {5: 2, 6: 2, 9: 4, 10: 4}  # its number -> shards that are whole by then


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(output of an undisturbed run, folder of a killed run by its moment)."""
    folders = {moment: tmp_path_factory.mktemp(f"killed_at_{moment}") for moment in KILLS}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        prepare()
        for folder in folders.values():
            shutil.copytree(".", folder, dirs_exist_ok=True)
        main(RUN)
        undisturbed = output()
    run = subprocess.run(
        [sys.executable, "-c", KILLED, *(str(word) for moment, folder in folders.items() for word in (folder, moment))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return undisturbed, folders


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_goes_on_and_gives_the_same_bytes(killed, monkeypatch, moment):
    undisturbed, folders = killed
    monkeypatch.chdir(folders[moment])
    saved = KILLS[moment]
    assert not store.trajectories_file("tiny").exists()
    assert list(Path("data").rglob(".*.partial")), "the kill came with a file half-way"
    assert len(shards()) == saved
    decoded = []
    monkeypatch.setattr(write, "decode_batch", lambda *a, **k: decoded.append(1) or decode_batch(*a, **k))
    main(RUN)
    assert output() == undisturbed
    assert len(decoded) == 4 - saved, "finished shards are not decoded again"


@pytest.mark.parametrize("cut", [1, 4, 100, None])
def test_a_damaged_shard_is_decoded_again(place, monkeypatch, cut):
    main(RUN)
    undisturbed = output()
    interrupted(monkeypatch, after=2)
    first = shards()[0]
    first.write_bytes(first.read_bytes()[:-cut] if cut else b"")
    main(RUN)
    assert output() == undisturbed


@pytest.mark.parametrize("damage", ["absent", "cut", "of another shard"])
def test_a_shard_without_its_contexts_is_decoded_again(place, monkeypatch, damage):
    main(RUN)
    undisturbed = output()
    interrupted(monkeypatch, after=2)
    first, second = sorted(Path("data/scratch").rglob("*.safetensors"))
    content = {"cut": first.read_bytes()[:-1], "of another shard": second.read_bytes()}
    first.unlink()
    if damage in content:
        first.write_bytes(content[damage])
    main(RUN)
    assert output() == undisturbed


def test_contexts_are_what_the_verifier_caches_of_each_text(place):
    """float16 keeps three digits."""
    main(RUN)
    verifier = load_verifier(store.verifier_folder("tiny"), dtype=torch.float32)
    kept = Contexts(store.contexts_folder("tiny"), [1])
    for row in store.read_parquet(store.trajectories_file("tiny"), store.TRAJECTORIES):
        wanted = cached_rows(verifier, [*row["prompt_ids"], *row["output_ids"]], [1])
        torch.testing.assert_close(kept[row["id"]].float(), wanted, rtol=1e-3, atol=1e-3)


def test_nothing_is_kept_where_no_layer_is_named(place):
    write_params(keep_layers=[])
    main(RUN)
    folder = store.contexts_folder("tiny")
    assert [path.name for path in folder.iterdir()] == ["index.json"]
    with pytest.raises(ValueError, match=r"adapt\.layers.*of layers \[\], not of \[1\].*trajectories\.keep_layers"):
        Contexts(folder, [1])


def test_a_layer_that_is_named_twice(place):
    write_params(keep_layers=[1, 1])
    with pytest.raises(ValueError, match=r"tiny\.trajectories: keep_layers: \[1, 1\] names a layer twice"):
        main(RUN)


def test_a_layer_the_verifier_does_not_have(place):
    write_params(keep_layers=[1, 2])
    with pytest.raises(ValueError, match=r"keep_layers: \[1, 2\] are not layers of a model with 2"):
        main(RUN)


@pytest.mark.parametrize("change", ["params", "corpus", "verifier"])
def test_a_changed_input_starts_over(place, monkeypatch, change):
    interrupted(monkeypatch, after=2)
    if change == "params":
        write_params(max_new_tokens=7)
    elif change == "corpus":
        write_corpus([f"{text}!" for text in TEXTS])
    else:
        save_tiny(store.verifier_folder("tiny"), build_tiny("llama", seed=2))
    main(RUN)
    resumed = output()
    for path in shards():
        path.unlink()
    store.trajectories_file("tiny").unlink()
    main(RUN)
    assert output() == resumed


def test_shard_and_batch_size_change_no_text(place):
    main(RUN)
    first = store.read_parquet(store.trajectories_file("tiny"), store.TRAJECTORIES)
    write_params(shard_size=100, batch_size=64)
    main(RUN)
    assert store.read_parquet(store.trajectories_file("tiny"), store.TRAJECTORIES) == first


@pytest.mark.parametrize(
    ("texts", "ids", "message"),
    [
        ([], [], "corpus.parquet: no prompts"),
        (["a", "b", "c"], ["x", "y", "x"], "corpus.parquet: ids come more than once: x"),
        (["a", "b"], ["x", "__metadata__"], "no prompt may be called __metadata__"),
        (["a", "b", "a"], ["x", "y", "z"], "prompts 'x' and 'z' are the same text"),
        (["a", "b" * 300], ["x", "y"], "prompt 'y' has 3.. tokens, the verifier's context 256"),
    ],
)
def test_a_corpus_that_cannot_be_used(place, texts, ids, message):
    write_corpus(texts, ids)
    with pytest.raises(ValueError, match=message):
        main(RUN)
    assert not store.trajectories_file("tiny").exists()


def test_a_missing_corpus_is_named_with_its_remedy(place):
    store.corpus_file("tiny").unlink()
    with pytest.raises(ValueError, match="not found; run dvc repro corpus"):
        main(RUN)


def test_the_code_that_shapes_an_answer_is_part_of_the_fingerprint():
    assert all(path.exists() for path in write.CODE)
    marks = {scratch.fingerprint({}, {}, write.CODE[:n]) for n in range(len(write.CODE) + 1)}
    assert len(marks) == len(write.CODE) + 1
