"""Hidden states: tapped rows are the verifier's own, stay in step with its cache, and come back as stored."""

import json
from pathlib import Path

import pytest
import torch

from kernels.tree import chain
from stages.common import entry, params, store
from stages.common.features import FINAL, Features, Taps, features_folder, write_index, write_shard
from stages.common.models import load_verifier
from stages.common.tiny import build_tiny, save_tiny
from stages.evaluate.contract import Proposal, Text
from stages.features.__main__ import CODE, main, read
from tests.stages.scripted import (
    DAMAGES,
    Scripted,
    always,
    causal_lm,
    engine_of,
    prompt_of,
    spoil,
    tiny_verifier,
    vanilla_text,
)

KINDS = ("llama", "qwen2", "gemma")
RUN = entry.Run(profile="tiny", words={})


@torch.no_grad()
def own_states(ids, reads, *, kind="llama", **sizes):
    """[T, C] by transformers itself. Its list has the embeddings first and, last, what comes out of the last norm."""
    out = causal_lm(kind, copy=1, **sizes).model(torch.tensor([list(ids)]), output_hidden_states=True)
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    found = [out.last_hidden_state if layer == FINAL else out.hidden_states[layer + 1] for layer in reads]
    return torch.cat([states[0] for states in found], -1)


def hooks(verifier):
    return sum(len(module._forward_hooks) for module in verifier.modules())


def tapped(verifier, ids, layers, **more):
    taps = Taps(verifier.body, layers)
    verifier.prefill(ids, verifier.new_cache(1), **more)
    taps.keep()
    taps.close()
    return taps.rows()


# Taps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_transformers_own_hidden_states(kind, chunk):
    verifier, ids = tiny_verifier(kind, layers=3), prompt_of(11)
    for layers in ([0, 1, FINAL], [FINAL], [FINAL, 0], [1]):
        found = tapped(verifier, ids, layers, chunk=chunk)
        assert found.shape == (11, 32 * len(layers))
        torch.testing.assert_close(found, own_states(ids, layers, kind=kind, layers=3), atol=1e-4, rtol=1e-4)


def test_the_last_layer_is_not_what_the_head_reads():
    """transformers lists only the latter: the norm stands between them."""
    verifier, ids = tiny_verifier(), prompt_of(5)
    found = tapped(verifier, ids, [1, FINAL])
    torch.testing.assert_close(verifier.body.norm(found[:, :32]), found[:, 32:])
    assert not torch.allclose(found[:, :32], found[:, 32:], atol=0.1)


@torch.inference_mode()
def test_what_is_kept_is_what_was_asked_for_in_that_order():
    verifier, ids = tiny_verifier(), prompt_of(6)
    every = tapped(verifier, ids, [0, FINAL])
    taps = Taps(verifier.body, [0, FINAL])
    assert taps.rows().shape == (0, 0)

    def one_pass(count):
        verifier.prefill(ids[:count], verifier.new_cache(1))

    one_pass(4)
    taps.keep([3, 0])
    one_pass(6)
    taps.drop()  # nothing of this pass
    one_pass(2)
    one_pass(3)
    taps.keep([1, 4])  # rows of passes in flight count on
    one_pass(1)
    taps.keep([])
    wanted = every[[3, 0, 1, 2]]
    torch.testing.assert_close(taps.rows(), wanted, atol=1e-5, rtol=1e-5)
    one_pass(2)
    taps.keep()
    torch.testing.assert_close(taps.rows(), torch.cat([wanted, every[:2]]), atol=1e-5, rtol=1e-5)
    assert taps.rows() is taps.rows(), "asking again copies nothing"
    taps.close()
    one_pass(6)
    assert len(taps.rows()) == 6, "closed taps hear nothing"


def test_hooks_are_gone_after_close():
    verifier = tiny_verifier()
    before = hooks(verifier)
    taps = Taps(verifier.body, [0, 1, FINAL])
    assert hooks(verifier) == before + 3
    taps.close()
    taps.close()
    assert hooks(verifier) == before


def test_nothing_is_tapped_where_nothing_is_read():
    taps = Taps(None, ())
    taps.drop()
    taps.keep([0, 1])
    assert taps.rows().shape == (0, 0)
    taps.close()


@pytest.mark.parametrize("layers", [[0, 2], [-2], [FINAL, 7]])
def test_a_layer_the_verifier_does_not_have(layers):
    verifier = tiny_verifier()
    with pytest.raises(ValueError, match=r"layers \[(2|-2|7)\].* 0 to 1, .*-1"):
        Taps(verifier.body, layers)
    assert hooks(verifier) == 0


# Through the engine -----------------------------------------------------------------------------------------


class Recording:
    """Another method's proposals; keeps what `State.features` gave in each cycle."""

    def __init__(self, inner, reads):
        self.inner, self.reads, self.cycles = inner, reads, []

    def start(self, prompt_ids, features_TC):
        self.cycles.clear()
        self.inner.start(prompt_ids, features_TC)

    def propose(self, state):
        self.cycles.append((list(state.ids), state.features().clone()))
        return self.inner.propose(state)


def check_rows(method, *, kind):
    for ids, rows in method.cycles:
        assert len(rows) == len(ids) - 1, "every token but the pending one"
        wanted = own_states(ids[:-1], method.reads, kind=kind, layers=3)
        torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("siblings", [False, True])
def test_the_engine_keeps_features_in_step_with_the_text(kind, siblings):
    """Drafts accepted whole, in part and not at all, trees with wrong nodes first, and a yardstick after each cycle."""
    verifier, prompt, reads = tiny_verifier(kind, layers=3), prompt_of(6), (FINAL, 0)
    settings = {"temperature": 1.3, "limit": 18}
    answer = vanilla_text(verifier, prompt, **settings)
    method = Recording(Scripted(answer, gamma=3, right=lambda cycle: (3, 1, 0, 2)[cycle % 4], siblings=siblings), reads)
    engine, text = engine_of(verifier, **settings), Text(list(prompt))
    for number, _ in enumerate(engine.stream(text, method, prompt_id="p")):
        engine.vanilla_steps(text, min(number % 4, len(text.output_ids) - 1), prompt_id="p")
    assert text.output_ids == answer
    assert {cycle.accepted for cycle in text.cycles} >= {0, 1, 2, 3}
    assert len(method.cycles) > 4
    check_rows(method, kind=kind)
    assert hooks(verifier) == 0


def test_the_next_text_starts_with_no_rows_of_the_last():
    verifier = tiny_verifier(layers=3)
    method, engine = Recording(Scripted([], gamma=2, right=always(0)), (0,)), engine_of(verifier, limit=5)
    for length in (9, 2, 4):
        text = engine.decode(prompt_of(length, seed=length), method, prompt_id="p")
        assert text.output_ids == vanilla_text(verifier, prompt_of(length, seed=length), limit=5)
        assert [len(rows) for _, rows in method.cycles] == [length + done for done in range(4)]
        check_rows(method, kind="llama")


@pytest.mark.parametrize("cycles", [0, 1, 3])
def test_hooks_are_gone_when_a_stream_is_closed_early(cycles):
    verifier = tiny_verifier(layers=3)
    stream = engine_of(verifier).stream(
        Text(prompt_of(4)), Recording(Scripted([], gamma=2, right=always(0)), (0, FINAL)), prompt_id="p"
    )
    for _ in range(cycles):
        next(stream)
    assert hooks(verifier) == (2 if cycles else 0)
    stream.close()
    assert hooks(verifier) == 0


def test_hooks_are_gone_when_a_method_fails():
    class Failing(Recording):
        def propose(self, state):
            return Proposal(chain(torch.tensor([5] * 99)))

    verifier = tiny_verifier(layers=3)
    with pytest.raises(AssertionError, match="beyond the limit"):
        engine_of(verifier).decode(prompt_of(4), Failing(Scripted([], gamma=1, right=always(0)), (1,)), prompt_id="p")
    assert hooks(verifier) == 0


def test_a_prompt_that_fills_the_context_taps_nothing():
    verifier = tiny_verifier(context=32)
    text = engine_of(verifier).decode(
        prompt_of(32), Recording(Scripted([], gamma=1, right=always(0)), (0,)), prompt_id="p"
    )
    assert text.finish_reason == "length"
    assert hooks(verifier) == 0


# Files ------------------------------------------------------------------------------------------------------

LAYERS = [4, FINAL, 1]  # as the index has them: in no order
WIDTH = 3


def stored(folder):
    g = torch.Generator().manual_seed(0)
    made = {f"text/{n}": torch.randn(n, WIDTH * len(LAYERS), generator=g) for n in (5, 9)}
    for number, (name, rows) in enumerate(made.items()):
        write_shard(folder / f"{number}.safetensors", {name: rows})
    write_index(folder, LAYERS, {name: f"{number}.safetensors" for number, name in enumerate(made)})
    return made


@pytest.mark.parametrize("layers", [[4, FINAL, 1], [1, 4, FINAL], [FINAL], [FINAL, 4]])
def test_the_layers_asked_for_come_back_in_the_order_asked(tmp_path, layers):
    made, kept = stored(tmp_path), Features(tmp_path, layers)
    for name, rows in made.items():
        columns = [rows[:, LAYERS.index(i) * WIDTH : (LAYERS.index(i) + 1) * WIDTH] for i in layers]
        assert torch.equal(kept[name], torch.cat(columns, 1).half())


def test_layers_that_were_not_kept_are_named_with_the_remedy(tmp_path):
    stored(tmp_path)
    wanted = r"layers \[4, -1, 1\], not of \[0, 7\]; add them to <profile>\.features\.layers in params\.yaml"
    with pytest.raises(ValueError, match=wanted):
        Features(tmp_path, [7, 4, 0])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_others_can_be_read(tmp_path, damage):
    made = stored(tmp_path)
    spoil(tmp_path, damage)
    kept = Features(tmp_path, LAYERS)
    assert torch.equal(kept["text/5"], made["text/5"].half())
    with pytest.raises(ValueError, match=r"1\.safetensors: damaged or half-written .*; run dvc repro features"):
        kept["text/9"]


def test_a_text_or_an_index_that_is_not_there_is_named(tmp_path):
    stored(tmp_path)
    with pytest.raises(ValueError, match=r"index\.json: nothing is kept of text 'text/6'; run dvc repro features"):
        Features(tmp_path, LAYERS)["text/6"]
    with pytest.raises(ValueError, match=r"elsewhere/index\.json: not found"):
        Features(tmp_path / "elsewhere", LAYERS)


@pytest.mark.parametrize("value", [7e4, -7e4, float("inf"), float("nan")])
def test_what_float16_cannot_hold_is_refused_and_not_written(tmp_path, value):
    rows = torch.ones(4, 6)
    rows[2, 3] = value
    with pytest.raises(ValueError, match=r"text 'b' are beyond float16; name other layers in <profile>\.features"):
        write_shard(tmp_path / "0.safetensors", {"a": torch.ones(4, 6), "b": rows})
    assert not list(tmp_path.iterdir())


# The stage --------------------------------------------------------------------------------------------------

SECTION = {"layers": [FINAL, 0, 2], "shard_size": 3}


def write_params(**changes):
    device = {"name": "cpu", "dtype": "float32", "threads": 1}
    tiny = {"device": device, "models": {}, "features": SECTION | changes}
    Path(params.PARAMS).write_text(json.dumps({"seed": 3, "tiny": tiny}))  # JSON is YAML


def write_trajectories(count):
    rows = []
    for number in range(count):
        ids = prompt_of(5 + 3 * number, seed=number)
        row = {"id": f"c/{number}", "prompt_ids": ids[:4], "output_ids": ids[4:], "finish_reason": "length"}
        rows.append(row | {"temperature": 0.0, "seed": 3})
    store.write_parquet(store.trajectories_file("tiny"), rows, store.TRAJECTORIES, {})
    return rows


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(store.verifier_folder("tiny"), build_tiny("llama", seed=1, layers=3))
    write_params()
    return write_trajectories(8)


def output():
    return {path.name: path.read_bytes() for path in features_folder("tiny").iterdir()}


def scratch_files():
    return sorted(Path("data/scratch").rglob("*.safetensors"))


def interrupted(monkeypatch, *, after):
    """Run until `after` texts are read, then Ctrl-C."""
    calls = []

    def counted(*args):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr("stages.features.__main__.read", counted)
        with pytest.raises(KeyboardInterrupt):
            main(RUN)


def test_the_stage_writes_what_taps_give_of_every_text(place):
    """float16 keeps three digits."""
    main(RUN)
    verifier = load_verifier(store.verifier_folder("tiny"), dtype=torch.float32)
    assert sorted(output()) == ["00000.safetensors", "00001.safetensors", "00002.safetensors", "index.json"]
    kept, final = Features(features_folder("tiny"), SECTION["layers"]), Features(features_folder("tiny"), [FINAL])
    for row in place:
        ids = [*row["prompt_ids"], *row["output_ids"]]
        wanted = tapped(verifier, ids, SECTION["layers"])
        assert kept[row["id"]].dtype == torch.float16
        torch.testing.assert_close(kept[row["id"]].float(), wanted, rtol=1e-3, atol=1e-3)
        assert torch.equal(final[row["id"]], kept[row["id"]][:, :32])
        torch.testing.assert_close(
            kept[row["id"]][:, :64].float(), own_states(ids, [FINAL, 0], layers=3), rtol=2e-3, atol=2e-3
        )
    assert not scratch_files(), "the resume state goes once the output is there"


@pytest.mark.parametrize("after", [3, 5, 7])
def test_a_killed_run_goes_on_behind_the_last_whole_shard_with_the_same_bytes(place, monkeypatch, after):
    main(RUN)
    undisturbed = output()
    interrupted(monkeypatch, after=after)
    assert output() == undisturbed, "what was there stays"
    assert len(scratch_files()) == after // 3
    calls = []
    monkeypatch.setattr("stages.features.__main__.read", lambda *args: calls.append(1) or read(*args))
    main(RUN)
    assert output() == undisturbed
    assert len(calls) == 8 - 3 * (after // 3), "finished shards are not read again"


@pytest.mark.parametrize("damage", ["cut", "empty", "of another shard"])
def test_a_damaged_shard_is_read_again(place, monkeypatch, damage):
    main(RUN)
    undisturbed = output()
    interrupted(monkeypatch, after=6)
    first, second = scratch_files()
    whole = first.read_bytes()
    first.write_bytes({"cut": whole[:-1], "empty": b"", "of another shard": second.read_bytes()}[damage])
    main(RUN)
    assert output() == undisturbed


@pytest.mark.parametrize("change", ["params", "trajectories", "verifier"])
def test_a_changed_input_starts_over(place, monkeypatch, change):
    interrupted(monkeypatch, after=6)
    if change == "params":
        write_params(layers=[0])
    elif change == "trajectories":
        write_trajectories(7)
    else:
        save_tiny(store.verifier_folder("tiny"), build_tiny("llama", seed=2, layers=3))
    calls = []
    monkeypatch.setattr("stages.features.__main__.read", lambda *args: calls.append(1) or read(*args))
    main(RUN)
    assert len(calls) == (7 if change == "trajectories" else 8)


def test_shard_size_changes_no_row(place):
    main(RUN)
    layers = SECTION["layers"]
    first = {row["id"]: Features(features_folder("tiny"), layers)[row["id"]] for row in place}
    write_params(shard_size=100)
    main(RUN)
    assert sorted(output()) == ["00000.safetensors", "index.json"]
    again = Features(features_folder("tiny"), layers)
    assert all(torch.equal(again[name], rows) for name, rows in first.items())


@pytest.mark.parametrize("layers", [[3], [-2, 0]])
def test_a_layer_that_is_not_there_is_refused(place, layers):
    write_params(layers=layers)
    with pytest.raises(ValueError, match=r"layers \[(3|-2)\].* 0 to 2, "):
        main(RUN)
    assert not features_folder("tiny").exists()


def test_the_code_that_shapes_a_row_is_part_of_the_fingerprint():
    assert {path.name for path in CODE} >= {"features.py", "models.py", "cache.py", "window.py", "__main__.py"}
    assert all(path.exists() for path in CODE)
