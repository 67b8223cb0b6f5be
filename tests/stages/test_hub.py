"""Models from the hub: a small server answers as the hub does, and everything that can be refused is refused first."""

import errno
import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.common import hub, store
from stages.common.models import load_causal_lm
from stages.common.params import ParamError, load
from stages.common.tiny import build_tiny, save_tiny
from stages.download import fetch as fetching
from stages.download.fetch import fetch
from stages.download.hub_errors import explained
from stages.download.models import make_models
from stages.download.params import HubDrafter, Models, VerifierHub
from tests.hub import COMMIT, lay_out, serve, use_cache

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "model-00001-of-00002.safetensors": b"1" * 300,
    "model-00002-of-00002.safetensors": b"2" * 200,
}
LEFT = {
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"import os",
    "README.md": b"# card",
    "original/consolidated.00.pth": b"pickle",
    "consolidated.safetensors": b"twice",
    "onnx/config.json": b"{}",
}
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serve(monkeypatch, tmp_path / "home") as hub_server:
        hub_server.repos["models/a/b"] = MODEL | LEFT
        yield hub_server


def downloads(server):
    return [path for command, path in server.asked if command == "GET" and "/resolve/" in path]


def test_a_model_is_what_transformers_needs_and_nothing_that_runs(server):
    manifest = fetch("a/b", revision=COMMIT, files=None)
    assert set(manifest["files"]) == set(MODEL)
    paths = hub.cached_files(manifest, remedy="")
    assert {name: path.read_bytes() for name, path in paths.items()} == MODEL
    assert {name: store.sha256_file(path) for name, path in paths.items()} == {
        name: facts["sha256"] for name, facts in manifest["files"].items()
    }
    assert len(downloads(server)) == len(MODEL)


def test_what_was_verified_is_neither_asked_for_nor_read_again(server, monkeypatch):
    manifest = fetch("a/b", revision=COMMIT, files=None)
    asked = len(server.asked)
    monkeypatch.setattr(fetching, "_read", None)
    assert fetch("a/b", revision=COMMIT, files=None) == manifest
    some = fetch("a/b", revision=COMMIT, files=[FIRST])
    assert some["files"] == {FIRST: manifest["files"][FIRST]}
    assert len(server.asked) == asked


def test_one_whole_file_of_weights_is_enough():
    assert fetching.needed(["model.safetensors", FIRST, "config.json"], repo="a/b") == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"repo": "a/nothing"}, "no model a/nothing at http.*/a/nothing that is public"),
        ({"repo": "a b"}, "'a b' names no repository"),
        ({"revision": "main"}, "revision 'main' is no commit of 40 .*commits/main"),
        ({"revision": COMMIT[:12]}, "is no commit of 40"),
        ({"revision": "f" * 40}, f"a/b has no commit {'f' * 40}.*commits/main"),
        ({"files": ["model-0001-of-0002.safetensors"]}, rf"no file 'model-0001.*there: .*{FIRST}"),
        ({"files": ["pytorch_model.bin"]}, "pytorch_model.bin can run code"),
        ({"files": ["modeling_evil.py"]}, "modeling_evil.py can run code"),
        ({"files": {FIRST: "0" * 64}}, f"{FIRST}: the hub holds [0-9a-f]*, params.yaml pins 0000"),
        ({"files": {"config.json": "0" * 64}}, "config.json: its sha256 is [0-9a-f]*, params.yaml pins 0000"),
    ],
)
def test_mistakes_are_named_before_any_weight_comes(server, asked, said):
    with pytest.raises(ValueError, match=said) as error:
        fetch(**{"repo": "a/b", "revision": COMMIT, "files": None} | asked)
    assert "\n" not in str(error.value)
    assert not [path for path in downloads(server) if path.endswith(".safetensors")]
    if "revision" in asked and len(asked["revision"]) != 40:
        assert isinstance(error.value, ParamError)
        assert not server.asked


def test_a_gated_repository_says_what_to_accept_and_what_to_set(server, monkeypatch):
    server.gated.add("models/a/b")
    with pytest.raises(ValueError, match=rf"a/b is gated: accept its terms at {server.url}/a/b, then set HF_TOKEN"):
        fetch("a/b", revision=COMMIT, files=None)
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(ValueError, match=rf"your token's account has no access: ask for it at {server.url}/a/b"):
        fetch("a/b", revision=COMMIT, files=None)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match="the hub refuses your token"):
        fetch("a/b", revision=COMMIT, files=None)
    assert not downloads(server)
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    assert set(fetch("a/b", revision=COMMIT, files=None)["files"]) == set(MODEL)


def test_a_full_disk_is_seen_before_the_download(server, tmp_path, monkeypatch):
    lay_out(tmp_path / "home", "a/b", COMMIT, {FIRST: MODEL[FIRST]})
    missing = sum(map(len, MODEL.values())) - len(MODEL[FIRST])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=missing - 1))
    with pytest.raises(ValueError, match=r"a/b: 0\.0 MB to download, 0\.0 MB free at .*HF_HOME"):
        fetch("a/b", revision=COMMIT, files=None)
    assert not downloads(server)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=missing))
    fetch("a/b", revision=COMMIT, files=None)
    with pytest.raises(ValueError, match=r"the disk of .* is full"), explained("a/b", COMMIT, "model"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_hub_that_is_down_or_away(server, monkeypatch):
    server.broken = 500
    with pytest.raises(ValueError, match="a/b: the hub answers 500; wait and run again"):
        fetch("a/b", revision=COMMIT, files=None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and never listens
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"a/b: no way to http.*check network and proxy, or set HF_HUB_OFFLINE=1"):
            fetch("a/b", revision=COMMIT, files=None)


def test_only_pickles_are_refused_with_a_way_out(server):
    server.repos["models/a/old"] = LEFT | {"config.json": b"{}"}
    with pytest.raises(ValueError, match=r"a/old: no model\.safetensors .*pytorch_model\.bin.*pin a commit"):
        fetch("a/old", revision=COMMIT, files=None)


def test_offline_a_complete_cache_gives_the_same_manifest(server, tmp_path, monkeypatch):
    online = fetch("a/b", revision=COMMIT, files=None)
    shutil.rmtree(store.scratch_file())
    use_cache(monkeypatch, tmp_path / "copy")
    lay_out(tmp_path / "copy", "a/b", COMMIT, MODEL | LEFT)
    assert fetch("a/b", revision=COMMIT, files=None) == online
    lay_out(tmp_path / "copy", "a/part", COMMIT, {name: MODEL[name] for name in MODEL if name != FIRST})
    with pytest.raises(ValueError, match=f"a/part at {COMMIT}: offline, and the cache .* lacks {FIRST}; unset"):
        fetch("a/part", revision=COMMIT, files=None)
    with pytest.raises(ValueError, match=r"a/none at .*: offline, and the cache .* holds nothing of it"):
        fetch("a/none", revision=COMMIT, files=None)


@pytest.mark.parametrize("name", [FIRST, "config.json"])  # by SHA-256, by Git's hash
def test_a_damaged_file_is_found_by_its_contents(server, tmp_path, monkeypatch, name):
    snapshot = lay_out(tmp_path / "home", "a/b", COMMIT, MODEL)
    (snapshot / name).write_bytes(b"x" * len(MODEL[name]))
    with pytest.raises(ValueError, match=f"{name}: its contents are not those that the hub holds; delete .*/blobs/"):
        fetch("a/b", revision=COMMIT, files=None)
    use_cache(monkeypatch, tmp_path / "home")
    with pytest.raises(ValueError, match=f"{name}: its contents are not"):
        fetch("a/b", revision=COMMIT, files=None)


# Folders of a profile ----------------------------------------------------------------------------------------


def hub_model(repo="a/b", *, files=None, template=None):
    return VerifierHub(source="hub", repo=repo, revision=COMMIT, files=files, template=template)


def test_a_folder_without_a_manifest_is_itself(tmp_path):
    assert hub.local_folder(tmp_path) == tmp_path


def test_a_model_of_the_hub_loads_from_the_cache_by_its_manifest(tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path / "home")
    model = build_tiny("qwen2", seed=1, tied=True, layers=1, width=16, heads=2, key_heads=1, vocab=264, context=64)
    save_tiny(tmp_path / "made", model)
    files = {path.name: path for path in (tmp_path / "made").iterdir()}
    snapshot = lay_out(tmp_path / "home", "a/tiny", COMMIT, files)
    made = make_models("p", Models(verifier=hub_model("a/tiny", template={"enable_thinking": False})))
    assert made == [store.verifier_folder("p")]
    assert sorted(path.name for path in made[0].iterdir()) == ["hub.json", "template.json"]
    assert store.read_json(made[0] / "template.json") == {"enable_thinking": False}
    assert hub.local_folder(made[0]) == snapshot
    loaded = load_causal_lm(hub.local_folder(made[0]), next(model.parameters()).dtype)
    assert loaded.lm_head.weight.equal(model.lm_head.weight)
    before = store.sha256_folder(made[0])
    make_models(
        "p", Models(verifier=hub_model("a/tiny", files={"config.json": store.sha256_file(files["config.json"])}))
    )
    assert store.sha256_folder(made[0]) != before


def test_a_cache_that_lost_files_is_named_with_the_remedy(tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path / "home")
    snapshot = lay_out(tmp_path / "home", "a/b", COMMIT, MODEL)
    make_models("p", Models(verifier=hub_model()))
    folder = store.verifier_folder("p")
    (snapshot / FIRST).write_bytes(b"short")
    with pytest.raises(ValueError, match=f"a/b at {COMMIT}: .*{FIRST} has 5 bytes, not 300; .*dvc repro models"):
        hub.local_folder(folder)
    (snapshot / FIRST).unlink()
    with pytest.raises(ValueError, match=f"a/b at {COMMIT}: {FIRST} is not in the hub's cache .*dvc repro models"):
        hub.local_folder(folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=f"is not in the hub's cache {tmp_path / 'elsewhere'}"):
        hub.local_folder(folder)


def test_a_drafter_has_a_folder_while_params_name_one(tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path / "home")
    lay_out(tmp_path / "home", "a/b", COMMIT, MODEL)
    section = {
        "verifier": {
            "source": "hub",
            "repo": "a/b",
            "revision": COMMIT,
            "files": None,
            "template": {"date_string": "x"},
        },
        "drafter": {
            "source": "hub",
            "repo": "a/b",
            "revision": COMMIT,
            "files": None,
            "layout": "qwen2",
            "mask_token_id": 151666,
            "shift": "left",
        },
    }
    Path("params.yaml").write_text(json.dumps({"p": {"models": section}}))
    params = load(Models, "p", "models")
    assert isinstance(params.verifier, VerifierHub)
    assert isinstance(params.drafter, HubDrafter)
    verifier, drafter = make_models("p", params)
    assert store.foreign_folder("p") == drafter
    assert store.read_json(drafter / "hub.json") == store.read_json(verifier / "hub.json")
    assert hub.local_folder(drafter) == hub.local_folder(verifier)
    make_models("p", Models(verifier=hub_model()))
    assert not drafter.exists()


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_folder() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub.cache_folder() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/y")
    assert hub.cache_folder() == tmp_path / "y" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/z")
    assert hub.cache_folder() == Path("/z")
