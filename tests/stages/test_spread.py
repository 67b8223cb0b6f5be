"""A verifier over several devices, and a drafter on its own.

There is one device here: layers are apart by name, and one is brought from disk for each pass by accelerate, as layers
are that do not fit. What needs several GPUs is not tried.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model

from kernels.spread import SplitKVCache
from stages.common import entry, parallel, provenance, spread, store, tiny
from stages.common.decode import decode_batch
from stages.common.drafters import prune
from stages.common.entry import Placement
from stages.common.models import Verifier, load_causal_lm, load_verifier
from stages.common.params import ParamError, load
from stages.evaluate import parts
from tests.stages import laboratory
from tests.stages.scripted import (
    causal_lm,
    engine_of,
    prompt_of,
    tiny_drafter,
    tiny_verifier,
    vanilla_text,
)
from tests.stages.test_methods import method_of

ROOT = Path(__file__).parents[2]
CPU, ZERO = torch.device("cpu"), torch.device("cpu", 0)


def spread_out(tmp_path, kind="llama", *, layers=4):
    """A verifier whose layers accelerate runs, one of them from disk; another has a cache of its own."""
    model = tiny.build_tiny(kind, seed=1, layers=layers).requires_grad_(False)
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{layer}": ("disk" if layer == 1 else "cpu") for layer in range(layers)}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert spread.split_of(model) == spread.Split(CPU, (CPU,) * layers)
    split = spread.Split(CPU, (CPU, CPU, ZERO, CPU))
    return Verifier(model, vocab_size=tiny.VOCABULARY, end_ids=(), split=split).eval()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_verifier_that_is_spread_writes_the_same_text(tmp_path, kind):
    verifier, whole = spread_out(tmp_path, kind), tiny_verifier(kind, layers=4)
    assert verifier.devices == (CPU, ZERO)
    assert isinstance(verifier.new_cache(4), SplitKVCache)
    assert next(verifier.body.layers[1].parameters()).is_meta
    prompt = prompt_of(11)
    wanted = vanilla_text(whole, prompt, limit=10)
    assert vanilla_text(verifier, prompt, limit=10) == wanted
    settings = {"layers": [1, 2], "d2t": torch.arange(tiny.VOCABULARY), "vocab_size": tiny.VOCABULARY}
    drafter = prune(causal_lm(kind, copy=2, layers=4), **settings, prefix="verifier").eval()
    for place in (None, CPU):  # beside the verifier, and as if it were elsewhere
        engine = engine_of(verifier, limit=10)
        engine.drafter_device = place
        found = engine.decode(prompt, method_of("specdiff2_tree", drafter), prompt_id="p")
        assert found.output_ids == wanted


def test_hidden_states_of_layers_apart_are_gathered(tmp_path):
    verifier, whole = spread_out(tmp_path), tiny_verifier(layers=4)
    found = []
    for model in (verifier, whole):
        method = method_of("vanilla", None)
        method.reads = (0, 2, -1)
        features = []
        method.start = lambda _, rows, keep=features: keep.append(rows)
        engine_of(model, limit=3).decode(prompt_of(6), method, prompt_id="p")
        found.append(features[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_texts_at_once_want_one_device(tmp_path):
    verifier, settings = spread_out(tmp_path), {"seed": 0, "temperature": 0.0, "max_new_tokens": 2, "batch_size": 2}
    with pytest.raises(ValueError, match=r"device\.placement\.verifier: auto decodes one text at a time"):
        decode_batch(verifier, [prompt_of(3)], keys=["a"], **settings)


@pytest.mark.parametrize("prefix", ["own", "verifier"])
@pytest.mark.parametrize(("name", "temperature"), [("specdiff2_tree", 0.0), ("specdiff2", 0.7), ("specdiff", 0.7)])
def test_a_drafter_elsewhere_drafts_the_same(name, temperature, prefix):
    """Over several texts: cycles are equal to the token, and what is moved is counted."""
    verifier, drafter, texts, moved = tiny_verifier(), tiny_drafter(layers=[1], prefix=prefix), [], []
    for place in (None, CPU):
        engine = engine_of(verifier, temperature=temperature, limit=14)
        engine.drafter_device = place
        method = method_of(name, drafter)
        made = [engine.decode(prompt_of(n, seed=n), method, prompt_id=f"{n}").cycles for n in (9, 1, 17)]
        texts.append([[(c.tokens, c.accepted, c.nodes) for c in cycles] for cycles in made])
        moved.append(engine.moved_bytes)
    assert texts[0] == texts[1]
    assert moved[0] == 0
    committed = 9 + 1 + 17 + 3 * 13 - 3  # at most: the last cycle's rows are not read again
    row = 2 * 2 * 8 * 4  # key and value of two heads of width 8
    nodes = sum(cycle[2] for cycles in texts[1] for cycle in cycles)
    words = 8 * nodes + (4 * tiny.VOCABULARY * nodes if name == "specdiff" else 0)
    least = row * (committed - 3 * 6) if prefix == "verifier" else 0
    assert least + words <= moved[1] <= (row * committed if prefix == "verifier" else 0) + words


def test_an_embedding_for_another_device_is_a_copy(tmp_path):
    verifier = spread_out(tmp_path)
    own = verifier.body.embed_tokens
    copied = spread.copy_of(own)
    ids = torch.tensor([[3, 4]])
    assert torch.equal(copied(ids), own(ids))
    assert copied.weight.data_ptr() != own.weight.data_ptr()
    assert not hasattr(copied, "_hf_hook")
    with pytest.raises(ValueError, match=r"raise max_memory"):
        spread.copy_of(torch.nn.Embedding(3, 2, device="meta"))


def test_where_layers_compute_is_where_accelerate_brings_them():
    places = {"model.embed_tokens": 0, "model.layers.1": 1, "model.layers.10": "cpu", "model.layers": 0}
    model = SimpleNamespace(hf_device_map=places, model=SimpleNamespace(layers=range(11)))
    split = spread.split_of(model)
    assert split is not None
    assert split.home == torch.device("cuda:0")
    assert split.layers[1] == torch.device("cuda:1")
    assert {split.layers[layer] for layer in (0, 2, 10)} == {torch.device("cuda:0")}
    model.hf_device_map = {"": 0}
    assert spread.split_of(model) is None


def test_the_loader_takes_a_layout(tmp_path):
    """On a machine without GPUs `auto` is memory, and memory too small is disk."""
    tiny.save_tiny(tmp_path, causal_lm("llama", copy=1))
    prompt = prompt_of(7)
    wanted = vanilla_text(load_verifier(tmp_path, dtype=torch.float32, packed=False), prompt)
    for placement in (Placement(verifier="one"), Placement(verifier="auto", max_memory={"cpu": "1GB"})):
        verifier = load_verifier(tmp_path, dtype=torch.float32, placement=placement)
        assert vanilla_text(verifier, prompt) == wanted


def test_limits_are_those_of_accelerate():
    assert spread.max_memory(Placement(verifier="auto")) is None
    limits = {"0": "70GiB", "cpu": "10GiB"}
    assert spread.max_memory(Placement(verifier="auto", max_memory=limits)) == {0: "70GiB", "cpu": "10GiB"}


def test_a_placement_is_a_section_of_params(tmp_path):
    path = tmp_path / "params.yaml"
    text = "p: {device: {name: cuda, dtype: bfloat16, threads: 0, placement: {verifier: VERIFIER, drafter: 'cuda:1'}}}"
    path.write_text(text.replace("VERIFIER", "auto"))
    device = load(entry.Device, "p", "device", path=path)
    assert device.placement == Placement(verifier="auto", drafter="cuda:1")
    assert parts.drafter_device(device) == torch.device("cuda:1")
    assert spread.stamp(device.placement)["placement"] == "auto, drafter on cuda:1"
    path.write_text(text.replace("VERIFIER", "many"))
    with pytest.raises(ParamError, match=r"p\.device\.placement: .*'many'.* known verifier: one, auto, tp"):
        load(entry.Device, "p", "device", path=path)
    plain = entry.Device(name="cpu", dtype="float32", threads=1)
    assert parts.drafter_device(plain) is None
    assert spread.stamp(plain.placement) == {}
    assert "placement" not in provenance.stamp(device="cpu", dtype="float32")


def test_ranks_must_divide_the_heads(tmp_path, monkeypatch):
    tiny.save_tiny(tmp_path, causal_lm("llama", copy=1))
    placement = Placement(verifier="tp")
    with pytest.raises(ValueError, match=r"tp takes a process for each device"):
        load_causal_lm(tmp_path, torch.float32, placement=placement)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"4 heads and 2 key heads cannot be shared by 4 ranks"):
        load_causal_lm(tmp_path, torch.float32, placement=placement)
    assert spread.processes(None) == spread.processes(Placement(verifier="auto")) == 1
    assert spread.processes(Placement(verifier="tp", processes=8)) == 8
    assert not parallel.launch(entry.Run(profile="p", words={}), 8), "torchrun has started it already"
    assert spread.writes()
    monkeypatch.setenv("RANK", "3")
    assert not spread.writes()


@pytest.fixture
def profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    laboratory.prepare()


def test_a_pinned_drafter_goes_where_params_say(profile):
    apart = replace(laboratory.DEVICE, placement=Placement(verifier="one", drafter="cpu"))
    folder, texts, words = store.drafter_folder(laboratory.PROFILE, "streak"), [], []
    for device in (laboratory.DEVICE, apart):
        verifier, tokenizer = parts.load_models(laboratory.PROFILE, device)
        drafter, _ = parts.load_pinned(laboratory.PROFILE, folder, parts.WINDOW, verifier, tokenizer, device)
        words.append(drafter.body.embed_tokens is verifier.body.embed_tokens)
        engine = engine_of(verifier)
        engine.drafter_device = parts.drafter_device(device)
        method = method_of("specdiff2_tree", drafter)
        texts.append(engine.decode(prompt_of(9), method, prompt_id="p").output_ids)
        assert parts.transfers(engine) == ({"moved_bytes": engine.moved_bytes} if device is apart else {})
    assert words == [True, False]
    assert texts[0] == texts[1]
    ranks = replace(laboratory.DEVICE, placement=Placement(verifier="tp"))
    with pytest.raises(ValueError, match=r"this drafter reads the verifier's keys.*adapt\.prefix: own"):
        parts.load_pinned(laboratory.PROFILE, folder, parts.WINDOW, verifier, tokenizer, ranks)
    with pytest.raises(ValueError, match="tp is for cells, not for sweeps"):
        spread.refuse_ranks(ranks.placement, "sweeps")


def run(script, *arguments, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, *script, *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
        **{"capture_output": True, "text": True, "timeout": 300, "check": False, "cwd": cwd},
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.large
def test_the_stage_starts_its_ranks_and_one_of_them_writes(profile, tmp_path):
    path = Path("params.yaml")
    document = json.loads(path.read_text())
    document[laboratory.PROFILE]["device"] = vars(laboratory.DEVICE) | {"placement": {"verifier": "tp", "processes": 2}}
    path.write_text(json.dumps(document | {"methods": ["prompt_lookup"], "benchmarks": [laboratory.BENCHMARK]}))
    files = [store.cell_file(laboratory.PROFILE, laboratory.BENCHMARK, name) for name in ("vanilla", "prompt_lookup")]
    (manifest := store.manifest_file(laboratory.PROFILE, "prompt_lookup")).parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"drafter": None}))
    wanted = [row["output_ids"] for row in store.read_parquet(files[0], store.CELLS)]
    files[0].unlink()
    for file in files:
        run(["-m", "stages.evaluate"], laboratory.PROFILE, laboratory.BENCHMARK, file.stem, cwd=tmp_path)
        assert [row["output_ids"] for row in store.read_parquet(file, store.CELLS)] == wanted
    stamp = store.read_provenance(files[1])["stamp"]
    assert (stamp["placement"], stamp["devices"]) == ("tp", 2)


RANKS = """
import json, os, sys, torch
from dataclasses import replace
from pathlib import Path
from stages.common.drafters import prune
from stages.common.entry import Placement
from stages.common.models import load_verifier
from stages.common import spread
from tests.stages.scripted import engine_of, prompt_of, tiny_drafter, vanilla_text
from tests.stages.test_methods import method_of
verifier = load_verifier(Path(sys.argv[1]), dtype=torch.float32, placement=Placement(verifier="tp"))
shapes = [tuple(verifier.body.layers[0].self_attn.k_proj.weight.shape)]
prompt = prompt_of(13)
texts = [vanilla_text(verifier, prompt, temperature=t, limit=12) for t in (0.0, 0.7)]
for t in (0.0, 0.7):
    method = method_of("specdiff2_tree", tiny_drafter(sys.argv[2]))
    texts.append(engine_of(verifier, temperature=t, limit=12).decode(prompt, method, prompt_id="p").output_ids)
cache = verifier.new_cache(4)
scores = verifier.logits(verifier.prefill(prompt, cache)).tolist()
heads = cache.kv_L2BHCD.shape[3]
Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps([texts, scores, heads, spread.writes()]))
"""


@pytest.mark.large
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_two_ranks_write_the_text_of_one(tmp_path, kind):
    """Gloo and transformers' own plan: every rank has half of the heads, all the scores, and the same text."""
    tiny.save_tiny(tmp_path, causal_lm(kind, copy=1))
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(torchrun, str(script), str(tmp_path), kind)
    whole = load_verifier(tmp_path, dtype=torch.float32, packed=False)
    prompt = prompt_of(13)
    wanted = [vanilla_text(whole, prompt, temperature=t, limit=12) for t in (0.0, 0.7)]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank, (texts, scores, heads, writes) in enumerate(ranks):
        assert texts == [*wanted, *wanted]
        assert heads == 1
        assert writes == (rank == 0)
        assert scores == ranks[0][1], "to the bit: coins would part the ranks"
    full = whole.logits(whole.prefill(prompt, whole.new_cache(4)))
    torch.testing.assert_close(torch.tensor(ranks[0][1]), full, rtol=0, atol=1e-4)
