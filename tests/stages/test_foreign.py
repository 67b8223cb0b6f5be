"""Published drafters: read under their own names into transformers' classes, and refused where they are not that."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages.common import foreign
from stages.common.tiny import VOCABULARY
from tests.stages.published import MASK_ID, ROWS, byte_words, foreign_drafter, published
from tests.stages.scripted import causal_lm, prompt_of

NAMES = {
    "qwen2": {
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.norm.weight",
        "lm_head.weight",
    },
    "llama": {"embed_tokens.weight", "denoise_model.layers.1.mlp.up_proj.weight", "denoise_model.norm.weight"},
}
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(params=["qwen2", "llama"])
def place(request, tmp_path):
    return published(tmp_path, request.param)


def change(place, **said):
    path = place / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | said).items() if v != "absent"}))


@torch.no_grad()
def test_a_checkpoint_under_its_published_names_scores_as_transformers_own_class(place):
    kind = foreign.read_layout(place).layout
    names = set(json.loads((place / foreign.INDEX).read_text())["weight_map"])
    assert NAMES[kind] <= names
    model = foreign.model_of(foreign.config_of(place), foreign.weights_of(place, dtype=torch.float32))
    own = causal_lm(kind, False, seed=7, vocab=ROWS, context=256, copy=9)
    assert type(model) is type(own) is type(AutoModelForCausalLM.from_config(own.config))
    assert not hasattr(model.config, "auto_map")
    ids = torch.tensor([prompt_of(11)])
    assert torch.equal(model(ids).logits, own(ids).logits)
    assert model(ids).logits.shape[-1] == ROWS


@torch.no_grad()
def test_the_row_before_the_window_is_the_published_model_where_the_prefix_is_causal(place):
    drafter, ids = foreign_drafter(place), prompt_of(9)
    found = drafter.draft(ids, 3, drafter.new_cache(1))
    own = causal_lm(foreign.read_layout(place).layout, False, seed=7, vocab=ROWS, context=256, copy=9)
    wanted = own(torch.tensor([ids])).logits[0, -1, drafter.words_Vd]
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_bidirectional_is_the_published_models_full_attention(place):
    """Prefix, then masks as the model knows them; every row sees all, and row i speaks for place i + 1."""
    drafter, ids, mask = foreign_drafter(place, prefix="bidirectional"), prompt_of(9), 3
    own = causal_lm(foreign.read_layout(place).layout, False, seed=7, vocab=ROWS, context=256, copy=9)
    rows = torch.tensor([[*ids, *[foreign.read_layout(place).mask_token_id] * mask]])
    everything = torch.zeros(1, 1, rows.shape[1], rows.shape[1])
    logits = own(rows, attention_mask=everything).logits[0, len(ids) - 1 :, drafter.words_Vd]
    torch.testing.assert_close(drafter.draft(ids, mask + 1, None), logits, rtol=0, atol=1e-5)


def test_what_cannot_be_said_is_never_proposed(place):
    kind = foreign.read_layout(place).layout
    drafter, words = foreign_drafter(place), byte_words(place)
    wanted = [id_ for id_ in range(VOCABULARY) if id_ not in (1, MASK_ID[kind])]  # the start of a turn is no word
    assert words.same
    assert drafter.d2t.tolist() == drafter.words_Vd.tolist() == wanted, "not beyond the tokenizer either"
    assert len(drafter.t2d) > VOCABULARY
    assert drafter.mask_id == VOCABULARY
    table = drafter.embed(torch.tensor([5, drafter.mask_id]))
    assert torch.equal(table, drafter.body.embed_tokens.weight[[5, MASK_ID[kind]]])
    with torch.no_grad():
        drafter.lm_head.weight[MASK_ID[kind]] = 100.0
        drafter.lm_head.weight[VOCABULARY + 1 :] = 100.0
        q_GV = drafter.draft(prompt_of(4), 3, drafter.new_cache(1)).softmax(-1)
    torch.testing.assert_close(q_GV.sum(-1), torch.ones(3))
    assert q_GV.shape == (3, len(wanted))


def test_names_must_be_those_of_the_layout(place):
    kind = foreign.read_layout(place).layout
    index = json.loads((place / foreign.INDEX).read_text())
    name = "denoise_model.norm.weight" if kind == "llama" else "model.norm.weight"
    lost = {"weight_map": {k: v for k, v in index["weight_map"].items() if k != name} | {"time.weight": SHARD}}
    (place / foreign.INDEX).write_text(json.dumps(lost))
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unexpected \['time.weight'\]"):
        foreign.weights_of(place, dtype=torch.float32)


def test_layout_of_another_architecture_is_refused(tmp_path):
    place = published(tmp_path, "qwen2")
    foreign.write_layout(place, foreign.Layout(layout="llama", mask_token_id=5, shift="left"))
    with pytest.raises(ValueError, match=r"not the weights of a llama.*unexpected.*q_proj.bias.*models.drafter.layout"):
        foreign.weights_of(place, dtype=torch.float32)


def test_frequencies_of_old_versions_are_passed_over_and_shapes_checked(tmp_path):
    place = published(tmp_path, "llama")
    state = load_file(place / SHARD)
    index = json.loads((place / foreign.INDEX).read_text())
    extra = "denoise_model.layers.0.self_attn.rotary_emb.inv_freq"
    index["weight_map"][extra] = SHARD
    (place / foreign.INDEX).write_text(json.dumps(index))
    save_file(state | {extra: torch.ones(4)}, place / SHARD)
    assert len(foreign.weights_of(place, dtype=torch.bfloat16)) == len(index["weight_map"]) - 1
    change(place, intermediate_size=60)
    with pytest.raises(ValueError, match=r"is \(\d+, \d+\), config.json makes it"):
        foreign.weights_of(place, dtype=torch.float32)


def test_pickles_are_refused_with_the_reason(place):
    for path in place.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ValueError, match="neither"):
        foreign.weights_of(place, dtype=torch.float32)
    (place / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"only in pytorch_model.bin: a pickle runs code"):
        foreign.weights_of(place, dtype=torch.float32)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_theta": "absent"}, "lacks rope_theta, which layout qwen2 needs"),
        ({"num_key_value_heads": None}, "lacks num_key_value_heads"),
    ],
)
def test_configurations_that_would_be_guessed_are_refused(tmp_path, said, message):
    place = published(tmp_path, "qwen2")
    change(place, **said)
    with pytest.raises(ValueError, match=message):
        foreign.config_of(place)


def test_llama_2_names_no_rope_theta(tmp_path):
    place = published(tmp_path, "llama")
    change(place, rope_theta="absent")
    assert "rope_theta" not in foreign.config_of(place)


def test_the_tokenizer_is_read_without_the_checkpoints_code(tmp_path):
    """Dream's: vocab.json and merges.txt, and a class that only its own code has."""
    place = published(tmp_path, "qwen2")
    whole = json.loads((place / "tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    (place / "tokenizer.json").unlink()
    (place / "vocab.json").write_text(json.dumps(vocabulary))
    (place / "merges.txt").write_text("#version: 0.2\n")
    said = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    }
    added = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in whole["added_tokens"]}
    said |= {"added_tokens_decoder": added, "mask_token": "<|mask|>", "pad_token": "<|endoftext|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(said))
    tokens = foreign.drafter_tokens(place)
    assert [token.text for token in tokens.tokens if token and token.special][-1] == "<|mask|>"
    assert byte_words(place).same


def test_one_base_is_held_once(tmp_path):
    place = published(tmp_path, "llama")
    first = foreign.shared_weights(place, dtype=torch.float32, device="cpu")
    again = foreign.shared_weights(place, dtype=torch.float32, device="cpu")
    assert first is again
    models = [foreign.model_of(foreign.config_of(place), first) for _ in range(2)]
    heads = [model.lm_head.weight.data_ptr() for model in models]
    assert heads[0] == heads[1] != foreign.weights_of(place, dtype=torch.float32)["lm_head.weight"].data_ptr()
    shutil.copytree(place, tmp_path / "other" / "models" / "drafter")
    shutil.copy(place.with_name("layout.json"), tmp_path / "other" / "models")
    assert foreign.digest(tmp_path / "other" / "models" / "drafter") == foreign.digest(place), (
        "of content, not of place"
    )
    with pytest.raises(ValueError, match="dvc repro models"):
        foreign.base_of(tmp_path / "nowhere" / "drafters" / "adapt", "models/nothing")
