"""From a published drafter through adapt, sizes and distill: plain, trained or adapted, on one base, and lossless."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.adapt.__main__ import main as adapt
from stages.common import entry, foreign, params, store, studies
from stages.common.drafters import ForeignDrafter, load_drafter, read_card
from stages.common.params import ParamError, load
from stages.common.starts import Adapt
from stages.common.tiny import VOCABULARY, save_tiny
from stages.common.tokenizers import load_tokenizer
from stages.distill.__main__ import main as distill
from stages.download.models import make_drafter, make_models
from stages.download.params import DrafterTiny, Models, VerifierTiny
from stages.sizes.__main__ import main as sizes
from tests.stages.scripted import causal_lm, engine_of, prompt_of, tiny_verifier, vanilla_text
from tests.stages.test_methods import method_of
from tests.stages.test_sizes import TRAINING

PLAIN = {"config.json", "drafter.json", "words.safetensors"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"], "merge": False}
TINY = {"source": "tiny", "kind": "qwen2", "seed": 3, "layers": 2, "width": 32, "heads": 4, "key_heads": 2}
SIZES = {
    "masks": {"layers": [], "prefix": "bidirectional", "windows": 1},
    "many": {"layers": [], "prefix": "bidirectional"},
    "fed": {"layers": [], "prefix": "verifier"},
}
RECIPE = {"start": "drafter", "layers": [], "prefix": "own", "draft_vocab": 0, "training": TRAINING | {"steps": 0}}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(store.verifier_folder("p"), causal_lm(copy=6))
    make_drafter("p", DrafterTiny(**TINY, vocab=270, context=256, mask_token_id=VOCABULARY))
    rows = [
        {"id": f"c/{n}", "prompt_ids": prompt_of(6, seed=n), "output_ids": prompt_of(12, seed=n + 50), "seed": 3}
        for n in range(10)
    ]
    rows = [row | {"finish_reason": "length", "temperature": 0.0} for row in rows]
    store.write_parquet(store.trajectories_file("p"), rows, store.TRAJECTORIES, {})
    write()


def write(recipe=RECIPE, **aligned):
    training = TRAINING | {"full_mask_share": 1.0} | aligned
    profile = {"models": {}, "device": {"name": "cpu", "dtype": "float32", "threads": 1}, "adapt": recipe}
    profile |= {"validation": {"share": 0.4, "windows": 2, "tree_nodes": 3}, "sizes": SIZES}
    profile |= {"distill": {"training": training, "streak": {}, "first": {}}}
    document = {"seed": 3, "sizes": list(SIZES), "objectives": ["streak", "first"], "soft_objectives": [], "p": profile}
    Path(params.PARAMS).write_text(json.dumps(document))


def run(stage, **words):
    stage(entry.Run(profile="p", words=words))


def files(folder):
    return {path.name for path in folder.iterdir()}


def loaded(folder, *, packed=True) -> ForeignDrafter:
    name = load_tokenizer(store.verifier_folder("p")).fingerprint()
    drafter, _ = load_drafter(folder, embedding=None, tokenizer=name, config="", dtype=torch.float32, packed=packed)
    assert isinstance(drafter, ForeignDrafter)
    return drafter


def check_lossless(drafter):
    for temperature in (0.0, 0.7):
        wanted = vanilla_text(tiny_verifier(), prompt_of(7), temperature=temperature)
        engine = engine_of(tiny_verifier(), temperature=temperature)
        assert engine.decode(prompt_of(7), method_of("specdiff2", drafter), prompt_id="p").output_ids == wanted


def base_weights():
    return foreign.weights_of(store.foreign_folder("p"), dtype=torch.float32)


def test_no_training_is_the_published_model_with_its_acceptance_measured(place):
    run(adapt)
    folder = store.drafter_folder("p", "adapt")
    assert files(folder) == PLAIN, "the base is not repeated"
    card = read_card(folder)
    assert (card.base, card.embedding, card.tokenizer, card.layers) == ("models/drafter", "own", "verifier", ())
    assert (card.mask_token_id, card.vocab_size, card.prefix) == (VOCABULARY, VOCABULARY, "own")
    header, *rows = store.curves_file("p", "adapt").read_text().splitlines()
    assert len(rows) == 1
    assert {"step", "streak", "accept_1"} <= set(header.split(","))
    drafter = loaded(folder, packed=False)
    assert torch.equal(drafter.lm_head.weight, base_weights()["lm_head.weight"])
    check_lossless(loaded(folder))


def test_one_mask_beside_the_other(place):
    """The sweep of the two: `vary: {drafter: [adapt, size.masks]}`."""
    run(adapt)
    run(sizes, size="masks")
    folders = store.drafter_folder("p", "adapt"), studies.size_folder("p", "masks")
    assert [read_card(folder).prefix for folder in folders] == ["own", "bidirectional"]
    curves = [store.curves_file("p", name).read_text() for name in ("adapt", "size_masks")]
    assert curves[0] != curves[1]
    check_lossless(loaded(folders[1]))
    with pytest.raises(ValueError, match=r"training.windows: 2 with adapt.prefix bidirectional.*windows: 1"):
        run(sizes, size="many")
    with pytest.raises(ParamError, match=r"p.sizes.fed.prefix: a drafter never reads the verifier's"):
        run(sizes, size="fed")


def test_a_whole_training_has_weights_of_its_own_and_leaves_the_base_alone(place):
    write(RECIPE | {"training": TRAINING})
    before = base_weights()
    run(adapt)
    folder = store.drafter_folder("p", "adapt")
    assert files(folder) == PLAIN | {"model.safetensors"}
    drafter = loaded(folder, packed=False)
    assert not torch.equal(
        drafter.body.embed_tokens.weight[VOCABULARY], before["model.embed_tokens.weight"][VOCABULARY]
    )
    assert all(torch.equal(before[name], weight) for name, weight in base_weights().items())
    check_lossless(loaded(folder))


@pytest.mark.parametrize("prefix", ["own", "bidirectional"])
def test_adapters_of_one_base_share_it(place, prefix):
    write(RECIPE | {"prefix": prefix, "training": TRAINING | {"steps": 0, "windows": 1}}, lora=LORA, windows=1)
    run(adapt)
    run(distill, objective="streak")
    run(distill, objective="first")
    folders = [store.drafter_folder("p", name) for name in ("streak", "first")]
    assert all(files(folder) == PLAIN | ADAPTER for folder in folders)
    assert files(store.checkpoint_folder("p", "streak", 3)) == PLAIN | ADAPTER
    adapted = [loaded(folder) for folder in folders]
    state = [dict(drafter.named_parameters()) for drafter in adapted]
    shared = [name for name in state[0] if ".lora_" not in name]
    assert len(shared) > 20
    assert all(state[0][name].data_ptr() == state[1][name].data_ptr() for name in shared), "one base in memory"
    apart = [name for name in state[0] if ".lora_B" in name]
    assert any(not torch.equal(state[0][name], state[1][name]) for name in apart)
    check_lossless(adapted[0])
    assert read_card(folders[0]).provenance["sha256"]["base"] == foreign.digest(store.foreign_folder("p"))


def test_a_merged_adapter_is_whole_weights(place):
    write(lora=LORA | {"merge": True})
    run(adapt)
    run(distill, objective="streak")
    folder = store.drafter_folder("p", "streak")
    assert files(folder) == PLAIN | {"model.safetensors"}
    drafter, base = loaded(folder, packed=False), base_weights()
    state = dict(drafter.body.named_parameters())
    assert not torch.equal(state["layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"])
    assert torch.equal(state["layers.0.self_attn.k_proj.weight"], base["model.layers.0.self_attn.k_proj.weight"])
    check_lossless(loaded(folder))


@pytest.mark.parametrize("first", [None, LORA | {"merge": True}])
def test_an_adapter_over_a_trained_drafter_is_read_back_over_what_it_was_trained_on(place, first):
    write(RECIPE | {"training": TRAINING | ({"lora": first} if first else {})}, lora=LORA)
    run(adapt)
    run(distill, objective="streak")
    folder = store.drafter_folder("p", "streak")
    assert files(folder) == PLAIN | ADAPTER | {"model.safetensors"}
    trained = dict(loaded(store.drafter_folder("p", "adapt"), packed=False).named_parameters())
    adapted = dict(loaded(folder, packed=False).named_parameters())
    under = {name.replace(".base_layer.", "."): value for name, value in adapted.items() if ".lora_" not in name}
    assert all(torch.equal(trained[name], value) for name, value in under.items())
    published = base_weights()["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(under["body.layers.0.self_attn.q_proj.weight"], published)
    check_lossless(loaded(folder))


def test_another_base_than_it_was_made_from_is_refused(place):
    run(adapt)
    make_drafter("p", DrafterTiny(**TINY | {"seed": 4}, vocab=270, context=256, mask_token_id=VOCABULARY))
    with pytest.raises(ValueError, match=r"stands on other weights than .*models/drafter has now"):
        loaded(store.drafter_folder("p", "adapt"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": [0]}, "layers: a drafter is taken whole"),
        ({"draft_vocab": 90}, "draft_vocab: a drafter is taken whole"),
        ({"prefix": "verifier"}, "prefix: a drafter is taken whole and never reads the verifier's cache"),
        ({"start": "verifier", "layers": [0]}, "draft_vocab: 0 is for start: drafter"),
        ({"start": "verifier", "layers": [0], "draft_vocab": 9}, "training.steps: 0 is for start: drafter"),
    ],
)
def test_recipes_that_cannot_be_are_refused(place, changed, message):
    write(RECIPE | changed)
    with pytest.raises(ParamError, match=message):
        load(Adapt, "p", "adapt")


def test_a_drafter_that_is_not_there_and_steps_that_align_nothing(place):
    write(steps=0)
    run(adapt)
    with pytest.raises(ValueError, match=r"distill.training.steps: 0 aligns nothing"):
        run(distill, objective="streak")
    folder = store.foreign_folder("p")
    folder.rename(folder.with_name("gone"))
    with pytest.raises(ParamError, match=r"p.adapt.start: drafter, but p.models names none"):
        run(adapt)
    assert replace(load(Adapt, "p", "adapt"), prefix="bidirectional").start == "drafter"


def test_a_drafter_that_params_no_longer_name_goes(place):
    sizes_ = {"layers": 2, "width": 32, "heads": 4, "key_heads": 2, "vocab": 264, "context": 256}
    verifier = VerifierTiny(source="tiny", kind="llama", seed=0, tied=True, **sizes_)
    assert store.foreign_folder("p").exists()
    make_models("p", Models(verifier=verifier))
    assert files(store.verifier_folder("p").parent) == {"verifier"}
