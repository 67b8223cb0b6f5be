"""An exported folder drafts as the drafter it came from, whatever the kind, and fails where it does not.

transformers itself reads what is claimed to be its own; the names vLLM wants of Medusa are written down here.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from stages.common import entry, params, store
from stages.common.drafters import DrafterCard, prune, save_drafter
from stages.common.eagle import Eagle3Head, EagleHead
from stages.common.features import FINAL
from stages.common.fed import FedDrafter
from stages.common.heads import HeadCard, save_head
from stages.common.medusa import HydraHead, MedusaHead
from stages.common.models import config_digest, load_causal_lm, load_tokenizer, load_verifier
from stages.common.provenance import prompt_sha256
from stages.common.tiny import VOCABULARY, build_tiny, save_tiny
from stages.download.collect import rows
from stages.download.items import Item
from stages.export import forms, gate
from stages.export.__main__ import drafters, main

SOME = [word for word in range(VOCABULARY) if word % 3]
PADDED = VOCABULARY + 5
TREE = {"gamma": 3, "nodes": 6, "width": 4, "threshold": 0.0}
GROWN = {"gamma": 3, "top_k": 2, "nodes": 6, "threshold": 0.0}
EVALUATE = {
    "shared": {
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": 10,
        "repeats": 1,
        "warm_up_tokens": 2,
        "yardstick_every": 8,
        "yardstick_tokens": 2,
        "excuse_multiple": 0.0,
    },
    "vanilla": {"drafter": None},
    "prompt_lookup": {"drafter": None, "gamma": 4, "longest": 3, "shortest": 1},
    "specdiff2_tree": {"drafter": "other", **TREE},
    "dyspec": {"drafter": "student", **TREE},
    "medusa": {"drafter": "medusa", **TREE},
    "hydra": {"drafter": "hydra", **TREE},
    "eagle2": {"drafter": "eagle", **GROWN},
    "eagle3": {"drafter": "eagle3", **GROWN},
    "specdiff2_fed": {"drafter": "fed", **TREE},
}
HEADS = {
    "medusa": (MedusaHead, (FINAL,), {"heads": 3}, SOME),
    "hydra": (HydraHead, (FINAL,), {"heads": 3}, SOME),
    "eagle": (EagleHead, (FINAL,), {"layer": 1}, range(VOCABULARY)),
    "eagle3": (Eagle3Head, (0, 1, 2), {"layer": 1}, SOME),
    "fed": (FedDrafter, (0, 1), {"layers": 1, "start_layers": [1]}, SOME),
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> None:
    """A profile with a verifier, prompts and no drafters."""
    monkeypatch.chdir(tmp_path)
    folder = store.verifier_folder("tiny")
    save_tiny(folder, build_tiny("llama", seed=1, tied=False, layers=3))
    tokenizer = load_tokenizer(folder)
    rows = [
        {"id": f"p/{i}", "split": "test", "turns": [text], "reference": None, "category": "x", "prompt_sha256": ""}
        for i, text in enumerate(["one", "another one", "a third"])
    ]
    for row in rows:
        row["prompt_sha256"] = prompt_sha256(tokenizer.encode_prompt(row["turns"]))
    store.write_parquet(store.prompts_file("tiny", "sums"), rows, store.PROMPTS, {})
    part = {"limit": 3, "wording": "{prompt}", "source": {"source": "pypi", "wheel": "some-questions"}}
    store.write_parquet(store.corpus_file("tiny"), rows, store.PROMPTS, {"params": {"parts": {"sums": part}}})
    document = {
        "seed": 3,
        "benchmarks": ["sums"],
        "exports": [],
        "export": {"prompts": 10, "merge": True},
        "tiny": {"models": {}, "device": {"name": "cpu", "dtype": "float32", "threads": 1}, "evaluate": EVALUATE},
    }
    Path(params.PARAMS).write_text(json.dumps(document))


def common(objective: str, words: int) -> dict:
    folder = store.verifier_folder("tiny")
    return {
        "verifier_tokenizer": load_tokenizer(folder).fingerprint(),
        "verifier_config": config_digest(folder),
        "vocab_size": VOCABULARY,
        "draft_vocab_size": words,
        "parameters": 1234,
        "objective": objective,
        "provenance": {"command": "python -m stages.adapt tiny", "steps": 5, "sha256": {"corpus": "ab"}},
    }


def stir(module: torch.nn.Module) -> None:
    """Weights unlike the verifier's, and each head's unlike the others'."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "embed_tokens" not in name:
                p.add_(0.05 * torch.randn(p.shape, generator=g))


def make_model(name: str, *, kind: str, prefix="own", words=SOME, order=1) -> None:
    causal_lm = load_causal_lm(store.verifier_folder("tiny"), torch.float32)
    d2t = torch.tensor(list(words)[::order])
    drafter = prune(causal_lm, layers=[0, 2], d2t=d2t, vocab_size=VOCABULARY, prefix=prefix)
    stir(drafter)
    card = DrafterCard(
        kind=kind,
        block_size=3,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix=prefix,
        layers=(0, 2),
        **common("trie_streak", len(d2t)),
    )
    with store.replace_folder(store.drafter_folder("tiny", name)) as out:
        save_drafter(out, drafter, card)


def make_head(name: str) -> None:
    cls, reads, settings, words = HEADS[name]
    verifier = load_verifier(store.verifier_folder("tiny"), dtype=torch.float32, packed=False)
    head = cls.build(verifier, reads=reads, d2t=torch.tensor(list(words)), **settings)
    if hasattr(head, "initialise"):
        head.initialise(seed=0)
    else:
        head.begin([5, 6, 7, 8])
    stir(head)
    card = HeadCard(kind=name, target_layer_ids=reads, settings=head.settings(), **common(name, len(words)))
    with store.replace_folder(store.drafter_folder("tiny", name)) as out:
        save_head(out, head, card)


def export(name: str) -> Path:
    main(entry.Run(profile="tiny", words={"drafter": name}))
    return store.export_folder("tiny", name)


MODELS = {
    "adapt": {"kind": "masked_window"},
    "streak": {"kind": "masked_window", "prefix": "verifier"},
    "student": {"kind": "causal"},
    "whole": {"kind": "causal", "words": range(VOCABULARY), "order": -1},  # its words not in the order of ids
}


@pytest.mark.parametrize("name", [*MODELS, *HEADS])
def test_every_kind_is_accepted_as_before(place, name):
    """The stage itself compares; what it wrote is looked at here."""
    if name in MODELS:
        make_model(name, **MODELS[name])
    else:
        make_head(name)
    folder = export(name)
    facts, words = store.read_json(folder / "acceptance.json"), (folder / "README.md").read_text()
    assert facts["prompts"] == 3
    assert f"{facts['acceptance_length']:.2f} tokens a pass" in words
    for part in ("`tiny.models.verifier`", "1,234", "wheel some-questions", "python -m stages.adapt tiny", "5 steps"):
        assert part in words
    assert (folder / "drafter.json").read_bytes() == (store.drafter_folder("tiny", name) / "drafter.json").read_bytes()
    assert load_tokenizer(folder).fingerprint() == load_tokenizer(store.verifier_folder("tiny")).fingerprint()
    served = "No server loads it" not in words
    assert served == (name in ("whole", "medusa"))


def test_a_whole_student_is_an_ordinary_causal_lm(place):
    """transformers' own loading and forward pass, without this project's code or its verifier."""
    make_model("whole", **MODELS["whole"])
    folder = export("whole")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.vocab_size == PADDED, "as the verifier's, which servers ask for"
    ours = forms_maker("whole").original()
    ids = [7, 8, 9, 30]
    cache = ours.new_cache(8)
    wanted_V = ours.draft(ids, 1, cache)[0]
    with torch.no_grad():
        found_V = model(torch.tensor([ids])).logits[0, -1, ours.d2t]
    torch.testing.assert_close(found_V, wanted_V, rtol=1e-4, atol=1e-4)


def forms_maker(name: str) -> forms.Maker:
    folder = store.verifier_folder("tiny")
    verifier = load_verifier(folder, dtype=torch.float32)
    return forms.Maker(
        "tiny", store.drafter_folder("tiny", name), verifier, load_tokenizer(folder), dtype=torch.float32
    )


def test_transformers_loads_the_body_of_a_masked_drafter_with_the_masks_row(place):
    make_model("adapt", **MODELS["adapt"])
    folder = export("adapt")
    body, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    state = load_file(store.drafter_folder("tiny", "adapt") / "model.safetensors")
    rows_VD = body.get_input_embeddings().weight
    assert rows_VD.shape[0] == VOCABULARY + 1
    assert torch.equal(rows_VD[-1], state["mask_embedding"])
    assert body.config.num_hidden_layers == 2
    assert torch.equal(load_file(folder / "model.safetensors")["d2t"], torch.tensor(SOME))


def test_medusa_in_the_names_and_shapes_of_vllm(place):
    """vllm/model_executor/models/medusa.py and transformers_utils/configs/medusa.py."""
    make_head("medusa")
    folder = export("medusa")
    weights, config = load_file(folder / "model.safetensors"), store.read_json(folder / "config.json")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "token_map": (len(SOME),),
        **{f"blocks.{j}.layers.0.weight": (32, 32) for j in range(3)},
        **{f"lm_heads.{j}.weight": (len(SOME), 32) for j in range(3)},
    }
    assert (config["architectures"], config["model_type"]) == (["MedusaModel"], "medusa")
    assert (config["num_heads"], config["num_hidden_layers"], config["hidden_size"]) == (3, 1, 32)
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (PADDED, len(SOME))
    head = forms_maker("medusa").original()
    state_1D = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    for j in range(3):  # what vLLM computes: x + SiLU(W x), then the head
        x_1D = state_1D + torch.nn.functional.silu(state_1D @ weights[f"blocks.{j}.layers.0.weight"].T)
        none = torch.empty(1, 0, dtype=torch.long)
        torch.testing.assert_close(x_1D @ weights[f"lm_heads.{j}.weight"].T, head.scores(j + 1, state_1D, none))


@pytest.mark.parametrize("name", ["adapt", "medusa"])
def test_a_folder_that_drafts_otherwise_is_not_kept(place, monkeypatch, name):
    make_model(name, **MODELS[name]) if name in MODELS else make_head(name)
    whole = forms.save_file

    def spoilt(state, path, metadata):
        first = "lm_head.weight" if name == "adapt" else "lm_heads.0.weight"
        whole(state | {first: state[first].flip(0).contiguous()}, path, metadata)

    monkeypatch.setattr(forms, "save_file", spoilt)
    with pytest.raises(ValueError, match=r"drafts otherwise than the one it came from, on \d of 3 prompts, first p/"):
        export(name)
    assert not store.export_folder("tiny", name).exists()


def test_what_cannot_be_exported_is_named(place):
    assert drafters("tiny") == []
    with pytest.raises(ValueError, match=r"exports: no drafter 'absent' in data/tiny/drafters; train it"):
        export("absent")
    make_model("adapt", **MODELS["adapt"])
    assert drafters("tiny") == ["adapt"]
    with pytest.raises(ValueError, match=r"tiny\.evaluate: no method drafts with a drafter of kind 'new'"):
        gate.method_for("tiny", "adapt", "new")


def test_the_method_is_the_drafters_own_where_it_has_one(place):
    document = json.loads(Path(params.PARAMS).read_text())
    document["tiny"]["evaluate"]["specdiff2_trie"] = {"drafter": "mine", "gamma": 3, "drafts": 2, "temperature": 1.0}
    Path(params.PARAMS).write_text(json.dumps(document))
    assert gate.method_for("tiny", "mine", "masked_window") == "specdiff2_trie"
    assert gate.method_for("tiny", "another", "masked_window") == "specdiff2_tree"


def test_the_card_says_what_the_hub_says_of_the_verifier(place, tmp_path, monkeypatch):
    from stages.export import card

    folder = store.verifier_folder("tiny")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nlicense: other\n")
    assert card.verifier("tiny") == ("the model of `tiny.models.verifier`", "`apache-2.0`")
    (folder / "hub.json").write_text(json.dumps({"repo": "Some/Model", "revision": "0" * 40}))
    monkeypatch.setattr(card, "local_folder", lambda folder: folder)
    assert card.verifier("tiny")[0] == f"`Some/Model` at revision `{'0' * 40}`"


def test_a_drafter_that_proposes_nothing_shows_nothing():
    silent = [gate.Turns("p", [5, 6], [0], [([], [])])]
    with pytest.raises(ValueError, match="proposed nothing on 1 prompts"):
        gate.refuse_difference(Path("x"), silent, silent)


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_is_exported_as_weights_or_beside_those_of_its_base(place, merge):
    pytest.importorskip("peft")
    from stages.common import lora

    document = json.loads(Path(params.PARAMS).read_text())
    document["export"]["merge"] = merge
    Path(params.PARAMS).write_text(json.dumps(document))
    causal_lm = load_causal_lm(store.verifier_folder("tiny"), torch.float32)
    drafter = prune(causal_lm, layers=[0, 2], d2t=torch.tensor(SOME), vocab_size=VOCABULARY)
    lora.attach(drafter, lora.Lora(rank=2, alpha=4.0, targets=("q_proj", "down_proj"), merge=False), seed=0)
    stir(drafter)
    card = DrafterCard(
        kind="masked_window",
        block_size=3,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix="own",
        layers=(0, 2),
        **common("streak", len(SOME)),
    )
    with store.replace_folder(store.drafter_folder("tiny", "streak")) as out:
        save_drafter(out, drafter, card)
    folder = export("streak")
    assert lora.saved(folder) == (not merge)
    names = load_file(folder / "model.safetensors").keys()
    assert not [name for name in names if "lora" in name or "base_layer" in name]


def test_later_turns_of_a_chat_are_not_tried(place):
    """They stand behind an answer, which is not decoded here."""
    encode = load_tokenizer(store.verifier_folder("tiny")).encode_prompt
    chats = [Item("q1", "One?", None, "x", ("Two?",)), Item("q2", "Six?", None, "x", ("Ten?",))]
    found = [row for chat in chats for row in rows(chat, split="test", wording="{prompt}", encode=encode)]
    assert len(found) == 4
    store.write_parquet(store.prompts_file("tiny", "sums"), found, store.PROMPTS, {})
    tokenizer = load_tokenizer(store.verifier_folder("tiny"))
    assert [prompt.id for prompt in gate.held_out("tiny", tokenizer, ["sums"], count=9)] == ["q1", "q2"]
