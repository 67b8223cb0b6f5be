"""A chat's second turn: decoded behind vanilla's answer to the first, by every method, in every repeat."""

from typing import Any

import pytest

from stages.common import store
from stages.common.models import load_tokenizer, load_verifier
from stages.common.provenance import prompt_sha256
from stages.common.sweeps import Sweep
from stages.download.collect import rows
from stages.download.items import Item
from stages.evaluate import harness, parts
from stages.evaluate.__main__ import evaluate
from stages.evaluate.contract import Sampling
from stages.evaluate.engine import Engine
from stages.evaluate.methods.vanilla import Vanilla
from stages.grid.__main__ import chosen_prompts
from tests.stages import laboratory
from tests.stages.laboratory import BENCHMARK, DEVICE, PROFILE, SPLIT

ITEMS = [
    Item("q1", "One?", None, "x", ("Two?", "Three?")),
    Item("q2", "Four?", None, "x"),
    Item("q3", "Five?", None, "x", ("Six?",)),
]


@pytest.fixture(scope="module", autouse=True)
def _project(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("turns"))
        laboratory.prepare()
        encode = load_tokenizer(store.verifier_folder(PROFILE)).encode_prompt
        found = [row for item in ITEMS for row in rows(item, split=SPLIT, wording="{prompt}", encode=encode)]
        store.write_parquet(store.prompts_file(PROFILE, BENCHMARK), found, store.PROMPTS, {})
        patch.setitem(laboratory.EVALUATE, "shared", laboratory.SHARED | {"repeats": 2, "temperature": 0.8})
        laboratory.write_params()
        evaluate(PROFILE, BENCHMARK, "vanilla", DEVICE, seed=5)
        yield


def cell(method: str) -> dict[tuple[str, int], dict[str, Any]]:
    found = store.read_parquet(store.cell_file(PROFILE, BENCHMARK, method), store.CELLS)
    return {(row["prompt_id"], row["repeat"]): row for row in found}


def test_vanilla_answers_turn_after_turn_in_the_same_chat():
    found = cell("vanilla")
    assert [name for name, repeat in found if repeat == 0] == ["q1", "q1#2", "q1#3", "q2", "q3", "q3#2"]
    tokenizer = load_tokenizer(store.verifier_folder(PROFILE))
    verifier = load_verifier(store.verifier_folder(PROFILE), dtype=parts.resolve_dtype("float32", "cpu"))
    for repeat in (0, 1):
        coins = Sampling(temperature=0.8, top_k=0, top_p=1.0, seed=5 + repeat)
        chat: list[str] = []
        for name, turn in (("q1", "One?"), ("q1#2", "Two?"), ("q1#3", "Three?")):
            chat.append(turn)
            text = Engine(verifier, coins, max_new_tokens=10).decode(
                tokenizer.encode_prompt(chat), Vanilla(), prompt_id=name
            )
            assert text.output_ids == found[name, repeat]["output_ids"]
            chat.append(tokenizer.decode(text.output_ids))
    assert found["q1", 0]["output_ids"] != found["q1", 1]["output_ids"]  # so the second prompts differ, too


@pytest.mark.parametrize("method", ["prompt_lookup", "specdiff2_tree"])
def test_every_method_decodes_behind_vanillas_answers(method):
    pin = laboratory.EVALUATE[method]["drafter"]
    folder = store.drafter_folder(PROFILE, str(pin))
    manifest = {"method": method, "drafter": pin, "folder": None, "sha256": None}
    if pin:
        manifest |= {"folder": folder.as_posix(), "sha256": store.sha256_folder(folder)}
    store.write_json(store.manifest_file(PROFILE, method), manifest)
    evaluate(PROFILE, BENCHMARK, method, DEVICE, seed=5)
    vanilla, found = cell("vanilla"), cell(method)
    assert set(found) == set(vanilla)
    assert all(row["matches_vanilla"] for row in found.values())


def test_a_chat_needs_vanillas_answer_and_its_own_ids():
    tokenizer = load_tokenizer(store.verifier_folder(PROFILE))
    prompts = {prompt.id: prompt for prompt in parts.read_prompts(PROFILE, BENCHMARK, tokenizer)}
    second, third = prompts["q1#2"].behind, prompts["q1#3"].behind
    assert prompts["q1"].behind is None
    assert second is not None
    assert third is not None
    assert (second.answers, third.answers) == (("q1",), ("q1", "q1#2"))
    assert prompt_sha256(second.render([[65]])) != prompt_sha256(second.render([[66]]))
    with pytest.raises(ValueError, match="no text for prompt q1, repeat 1; run dvc repro vanilla"):
        harness.prompt_ids(prompts["q1#2"], 1, {("q1", 0): [65]})


def test_sweeps_count_first_turns_only():
    form = Sweep(benchmark=BENCHMARK, split=SPLIT, prompts=3, x="gamma", vary={"gamma": (2,)}, method="prompt_lookup")
    assert [prompt["id"] for prompt in chosen_prompts(PROFILE, form, "k")] == ["q1", "q2", "q3"]
