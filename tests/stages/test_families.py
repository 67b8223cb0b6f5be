"""Families of models: each scores and continues texts as transformers does, over windows, scales, caps and wrappers."""

from hashlib import sha256

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from kernels.cache import RaggedKVCache
from kernels.tree import Tree
from kernels.window import causal_mask
from stages.common import bodies, hub, probe, tiny
from stages.common.decode import decode_batch
from stages.common.eagle import EagleHead
from stages.common.models import Verifier, config_digest, load_verifier, pruned_body
from stages.common.tokenizers import load_tokenizer
from tests.stages.scripted import FURTHER, causal_lm, engine_of, full_logits, prompt_of, tiny_verifier, vanilla_text

SIZES = {
    **{"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1},
}
LIVELY = {"initializer_range": 0.3, "eos_token_id": None, "tie_word_embeddings": False}
OTHERS = {
    "gemma2": Gemma2Config(
        **SIZES,
        **LIVELY,
        **{"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
        **{"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    ),
    "granite": GraniteConfig(
        **SIZES,
        **LIVELY,
        **{"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "cohere": CohereConfig(**SIZES, **LIVELY, logit_scale=0.25),
    "qwen2 sliding": Qwen2Config(**SIZES, **LIVELY, use_sliding_window=True, sliding_window=6, max_window_layers=1),
}


def other(name, *, attention="eager"):
    """transformers' model; eager, since no other attention of theirs caps scores."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(OTHERS[name], attn_implementation=attention).eval().requires_grad_(False)


def greedy(model, prompt, count):
    """transformers' own text, with its cache."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", *FURTHER])
def test_vanilla_writes_what_transformers_writes(kind):
    prompt = prompt_of(9, seed=2)
    assert vanilla_text(tiny_verifier(kind), prompt, limit=14) == greedy(causal_lm(kind, copy=1), prompt, 14)


def test_generation_settings_of_a_folder_are_never_applied(tmp_path):
    """But for what ends a text: a chat model's own penalty, top-k and temperature are not asked for here."""
    model, prompt = tiny.build_tiny("llama", seed=1), prompt_of(9, seed=2)
    plain = greedy(model, prompt, 14)
    settings = {"repetition_penalty": 1.9, "do_sample": True, "temperature": 5.0, "top_k": 3, "min_new_tokens": 9}
    model.generation_config.update(**settings, eos_token_id=plain[5])
    tiny.save_tiny(tmp_path, model)
    verifier = load_verifier(tmp_path, dtype=torch.float32, packed=False)
    assert vanilla_text(verifier, prompt, limit=14) == plain[: plain.index(plain[5]) + 1]


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 4, 512])
@pytest.mark.parametrize("kind", FURTHER)
def test_prefill_in_chunks_scores_as_transformers(kind, chunk):
    verifier, prompt = tiny_verifier(kind), prompt_of(23)
    found_V = verifier.logits(verifier.prefill(prompt, verifier.new_cache(2), chunk=chunk))
    torch.testing.assert_close(found_V, full_logits(prompt, kind), rtol=0, atol=2e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kind", FURTHER)
def test_a_node_sees_the_places_before_it_and_not_the_rows(kind):
    """A tree as wide as a window is long: every node scores as the text of its own path."""
    engine, prompt = engine_of(tiny_verifier(kind)), prompt_of(11)
    engine.verifier.prefill(prompt[:-1], engine.cache)
    parents = [-1, -1, -1, 0, 1, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    tokens = torch.tensor(prompt_of(len(parents), seed=5))
    found_MV = engine.verify(prompt[-1], Tree(tokens, parents))
    for node, parent in enumerate(parents):
        path = [node]
        while parent >= 0:
            path.insert(0, parent)
            parent = parents[parent]
        wanted_V = full_logits([*prompt, *tokens[path].tolist()], kind)
        torch.testing.assert_close(found_MV[node + 1], wanted_V, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_texts_decoded_at_once_slide_each_by_its_own_places(kind):
    verifier, prompts = tiny_verifier(kind), [prompt_of(n, seed=n) for n in (3, 19, 8)]
    found = decode_batch(
        verifier,
        prompts,
        keys=["a", "b", "c"],
        **{"seed": 0, "temperature": 0.0, "max_new_tokens": 12, "batch_size": 2},
    )
    wanted = [vanilla_text(verifier, prompt, limit=12) for prompt in prompts]
    assert [decoded.output_ids for decoded in found] == wanted


def test_places_of_a_ragged_cache_are_its_columns():
    cache = RaggedKVCache(layers=1, slots=2, capacity=20)
    cache.lengths = [10, 3]
    positions, sees = cache.open(0, 2, new=2, device="cpu")
    near = bodies.nearby(sees, positions, 4, cache)
    assert near[0, 0].nonzero().flatten().tolist() == [7, 8, 9, 10]
    assert near[1, 1].nonzero().flatten().tolist() == [1, 2, 3, 4]


@torch.inference_mode()
@pytest.mark.parametrize("name", OTHERS)
def test_scales_caps_and_windows_of_other_families(name):
    """Scores against transformers' own, read in chunks; texts against its own, too."""
    model, prompt = other(name), prompt_of(17)
    wanted_V = model(torch.tensor([prompt])).logits[0, -1]
    text = greedy(model, prompt, 8)
    verifier = Verifier(other(name), vocab_size=264, end_ids=()).eval()
    found_V = verifier.logits(verifier.prefill(prompt, verifier.new_cache(4), chunk=5))
    assert wanted_V.std() > 0.1
    torch.testing.assert_close(found_V, wanted_V, rtol=0, atol=2e-5)
    assert vanilla_text(verifier, prompt, limit=8) == text
    assert len(set(text)) > 2


@torch.inference_mode()
def test_of_a_model_that_sees_the_text_part_is_taken(tmp_path):
    """And what is cut from it is cut from that part."""
    sight = SiglipVisionConfig(
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 16, "patch_size": 8},
    )
    text = tiny.build_tiny("gemma3", seed=4).config
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4, eos_token_id=2)
    ).eval()
    tiny.save_tiny(tmp_path, model)
    prompt = prompt_of(15)
    wanted_V = model(input_ids=torch.tensor([prompt])).logits[0, -1, : tiny.VOCABULARY]
    verifier = load_verifier(tmp_path, dtype=torch.float32, packed=False)
    found_V = verifier.logits(verifier.prefill(prompt, verifier.new_cache(4)))
    torch.testing.assert_close(found_V, wanted_V, rtol=0, atol=2e-5)
    assert verifier.end_ids == {2}
    model = bodies.text_part(model)
    assert pruned_body(model, [1]).config.layer_types == ["full_attention"]
    assert model.config.vocab_size == verifier.vocab_size + 5


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_is_computed_once_is_never_rounded(kind):
    verifier = Verifier(tiny.build_tiny(kind, seed=0), vocab_size=tiny.VOCABULARY, end_ids=())
    before = {name: buffer.clone() for name, buffer in verifier.body.named_buffers()}
    assert len(before) >= (5 if kind == "gemma3" else 2)
    verifier.to(torch.bfloat16).float()
    for name, buffer in verifier.body.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_a_text_ends_where_its_frequencies_would_change():
    factors = {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 10000.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    assert bodies.reach(LlamaConfig(**SIZES, rope_parameters=rope)) == 64
    assert bodies.reach(LlamaConfig(**SIZES)) == 128
    assert bodies.reach(tiny.build_tiny("gemma3", seed=0).config) == 256


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_a_head_of_one_layer_sees_the_whole_text(kind):
    """Although the verifier's layer that it starts from slides: its rows do not stand in a cache by their places."""
    verifier = tiny_verifier(kind, layers=3)
    torch.manual_seed(0)
    head = EagleHead.build(verifier, reads=(-1,), d2t=torch.arange(tiny.VOCABULARY), layer=1)
    head.begin(prompt_of(9))
    words, states = torch.tensor([prompt_of(20)]), torch.randn(1, 20, verifier.width)
    places, sees = torch.arange(20)[None], causal_mask(cached=0, new=20)
    before = head(words, states, places, sees)[0, -1]
    states[0, 0] = -states[0, 0]
    assert not torch.equal(head(words, states, places, sees)[0, -1], before)


@torch.inference_mode()
def test_a_model_of_the_hub_is_read_from_where_its_files_are(tmp_path, monkeypatch):
    """The tracked folder holds a manifest and the template's settings; all the rest is elsewhere."""
    tracked, cache = tmp_path / "tracked", tmp_path / "cache"
    tiny.save_tiny(cache, causal_lm("qwen3", copy=1))
    tracked.mkdir()
    monkeypatch.setattr(hub, "local_folder", lambda folder: {tracked: cache}[folder])
    verifier = load_verifier(tracked, dtype=torch.float32, packed=False)
    assert verifier.end_ids == set(tiny.END_IDS)
    assert config_digest(tracked) == sha256((cache / "config.json").read_bytes()).hexdigest()
    assert load_tokenizer(tracked).size == tiny.VOCABULARY
    (tracked / "template.json").write_text('{"tools": 1, "nothing": 2}')
    with pytest.raises(ValueError, match="asks for nothing named tools, nothing"):
        load_tokenizer(tracked)


class TestProbe:
    """Families that no test knows are held against transformers' own scores when they are loaded."""

    def test_a_family_that_is_run_as_it_should_be_is_taken(self):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Olmo2Config(**SIZES, **LIVELY)).eval()
        expected = probe.expected(model)
        assert expected is not None
        probe.check(Verifier(model, vocab_size=264, end_ids=()), expected)

    def test_known_families_are_not_held_up(self):
        assert probe.expected(causal_lm()) is None

    def test_a_family_with_scores_of_its_own_is_refused(self):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Olmo2Config(**SIZES, **LIVELY)).eval()
        expected = probe.expected(model)
        model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())
        with pytest.raises(ValueError, match=r"olmo2: scores are \d+% off transformers' own"):
            probe.check(Verifier(model, vocab_size=264, end_ids=()), expected)

    def test_a_family_that_cannot_be_run_is_refused(self):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Olmo2Config(**SIZES, **LIVELY)).eval()
        expected = probe.expected(model)
        verifier = Verifier(model, vocab_size=264, end_ids=())
        verifier.body.layers[1].self_attn.v_proj = nn.Linear(32, 24)
        with pytest.raises(ValueError, match="olmo2: cannot be run with a tree of drafts"):
            probe.check(verifier, expected)

    def test_a_decoder_of_another_layout_is_named(self):
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SIZES))
        with pytest.raises(ValueError, match="GPTNeoXForCausalLM has no embed_tokens, layers"):
            Verifier(model, vocab_size=264, end_ids=())
