"""Verifiers score as transformers does, over explicit rows; what cannot be run right is refused by name."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from kernels.window import causal_mask
from stages.common import tiny
from stages.common.bodies import grouped_attention
from stages.common.models import (
    CausalModel,
    Verifier,
    end_ids_of,
    load_causal_lm,
    load_verifier,
    pruned_body,
    resolve_dtype,
)
from stages.common.packing import PackedLinear, can_pack, pack_linears
from stages.common.tokenizers import load_tokenizer
from tests.stages.scripted import KINDS, causal_lm, full_logits, prompt_of, tiny_verifier

packs = pytest.mark.skipif(not can_pack("cpu", torch.float32), reason="needs oneDNN")


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 4, 512])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_prefill_in_chunks_scores_as_transformers(kind, tied, chunk):
    verifier, prompt = tiny_verifier(kind, tied), prompt_of(9)
    cache = verifier.new_cache(2)
    found_V = verifier.logits(verifier.prefill(prompt, cache, chunk=chunk))
    torch.testing.assert_close(found_V, full_logits(prompt, kind, tied), rtol=0, atol=1e-5)
    assert cache.length == 9


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_texts_of_a_batch_may_see_different_rows(kind):
    verifier = tiny_verifier(kind)
    ids = torch.tensor([prompt_of(6), [*prompt_of(3, seed=1), 7, 7, 7]])
    sees = causal_mask(cached=0, new=6).expand(2, -1, -1).clone()
    sees[1, 3:, 3:] = torch.eye(3).bool()
    found = verifier.logits(verifier(ids, torch.arange(6).expand(2, -1), sees))
    torch.testing.assert_close(found[0, -1], full_logits(ids[0].tolist(), kind), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1, 2], full_logits(ids[1, :3].tolist(), kind), rtol=0, atol=1e-5)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_attention_is_attention_with_repeated_keys(key_heads):
    g = torch.Generator().manual_seed(0)
    heads, group = 4, 4 // key_heads
    q = torch.randn(2, heads, 3, 8, generator=g)
    k, v = torch.randn(2, 2, key_heads, 5, 8, generator=g)
    bias = torch.randn(2, 1, 3, 5, generator=g)
    found, _ = grouped_attention(None, q, k, v, bias.repeat(1, 1, group, 1), scaling=0.3)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@packs
@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_compute_the_same(rows, bias):
    torch.manual_seed(0)
    linear = nn.Linear(24, 10, bias=bias)
    x = torch.randn(2, rows, 24)
    torch.testing.assert_close(PackedLinear(linear, rows=16)(x), linear(x), rtol=0, atol=1e-5)
    model = nn.Sequential(linear, nn.Sequential(nn.Linear(10, 10)))
    wanted = model(x)
    pack_linears(model)
    assert not any(isinstance(child, nn.Linear) for child in model.modules())
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-5)


@packs
@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_verifier_scores_alike_packed_and_plain(tmp_path, tied):
    tiny.save_tiny(tmp_path, causal_lm("llama", tied, copy=1))
    prompt, found = prompt_of(7), []
    for packed in (True, False):
        verifier = load_verifier(tmp_path, dtype=torch.float32, packed=packed)
        assert verifier.end_ids == set(tiny.END_IDS)
        assert verifier.vocab_size == tiny.VOCABULARY
        found.append(verifier.logits(verifier.prefill(prompt, verifier.new_cache(8))))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], full_logits(prompt, "llama", tied), rtol=0, atol=1e-5)


def test_end_ids_come_from_the_generation_settings_then_from_the_config(tmp_path):
    model = tiny.build_tiny("llama", seed=0)
    model.config.eos_token_id = 1
    tiny.save_tiny(tmp_path, model)
    assert end_ids_of(tmp_path) == [0, 2]
    (tmp_path / "generation_config.json").unlink()
    assert end_ids_of(tmp_path) == [1]
    model.config.eos_token_id = None
    model.config.save_pretrained(tmp_path)
    assert end_ids_of(tmp_path) == []


def test_what_ends_a_text_may_be_named_in_many_ways(tmp_path):
    """None, one or several, in the generation settings, the configuration or both."""
    model = tiny.build_tiny("llama", seed=0)
    for settings, config, wanted in [
        (7, [1, 2], [7]),
        ([9, 7], None, [7, 9]),
        (None, [5], [5]),
        (None, None, []),
    ]:
        model.config.eos_token_id, model.generation_config.eos_token_id = config, settings
        tiny.save_tiny(tmp_path, model)
        assert end_ids_of(tmp_path) == wanted


def test_layers_that_neither_attend_fully_nor_slide_are_refused():
    body = tiny.build_tiny("qwen2", seed=0).model
    body.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"qwen2: layers of kind linear_attention are not built"):
        CausalModel(body)


def test_a_model_of_another_layout_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no embed_tokens, layers"):
        CausalModel(nn.Linear(2, 2))


def test_attention_with_sinks_is_refused():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="attention with s_aux is not built"):
        grouped_attention(None, q, q, q, None, scaling=1.0, s_aux=torch.zeros(2))


@pytest.mark.parametrize("layers", [[], [2], [-1], [0, 5]])
def test_pruning_names_layers_that_are_not_there(layers):
    with pytest.raises(ValueError, match=r"adapt\.layers: .* must be layers of the verifier, 0 to 1"):
        pruned_body(causal_lm(), layers)


def test_pruning_keeps_the_layers_named_and_leaves_the_verifier_alone():
    model = causal_lm("gemma")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    body = pruned_body(model, [1])
    assert body.embed_tokens is model.model.embed_tokens
    kept_layer, sources = body.layers[0].state_dict(), model.model.layers[1].state_dict()
    assert kept_layer.keys() == sources.keys()
    for name, kept in kept_layer.items():
        source = sources[name]
        assert torch.equal(kept, source), name
        assert kept.data_ptr() != source.data_ptr(), "training the drafter must not train the verifier"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@torch.inference_mode()
def test_pruning_keeps_the_settings_of_the_layers_it_keeps():
    """SmolLM3 rotates no keys in some layers: a pruned copy scores as the model does with its other layers left out."""
    config = SmolLM3Config(
        **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "pad_token_id": 0},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "no_rope_layers": [1, 0, 1, 0]},
    )
    torch.manual_seed(0)
    model = SmolLM3ForCausalLM(config).eval()
    for layers in ([1, 2], [2], [3]):
        body = pruned_body(model, layers)
        assert body.config.no_rope_layers == [config.no_rope_layers[layer] for layer in layers]
        cut = deepcopy(model)
        cut.model.layers = nn.ModuleList(cut.model.layers[layer] for layer in layers)
        cut.config.num_hidden_layers = len(layers)
        for index, layer in enumerate(cut.model.layers):
            layer.self_attn.layer_idx = index
        ids = torch.tensor([prompt_of(7, seed=1)]) % 40
        torch.testing.assert_close(body(ids).last_hidden_state, cut.model(ids).last_hidden_state, rtol=0, atol=1e-5)


def test_dtype_names():
    assert resolve_dtype("float32", "cpu") == torch.float32
    assert resolve_dtype("bfloat16", "cpu") == torch.bfloat16
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    with pytest.raises(ValueError, match=r"device\.dtype: 'half'"):
        resolve_dtype("half", "cpu")


def test_a_folder_without_a_model_says_what_makes_it(tmp_path):
    with pytest.raises(ValueError, match="dvc repro"):
        load_causal_lm(tmp_path, torch.float32)


def test_tokenizer_renders_turns_and_knows_where_the_user_speaks(tmp_path):
    tiny.save_tiny(tmp_path, causal_lm(copy=1))
    tokenizer = load_tokenizer(tmp_path)
    prefix = tokenizer.user_turn_prefix()
    assert tokenizer.decode(prefix, skip_special=False).endswith("<|im_start|>user\n")
    one = tokenizer.encode_prompt(["hi"])
    assert one[: len(prefix)] == prefix
    three = tokenizer.encode_prompt(["hi", "ho", "he"])
    assert tokenizer.decode(three).count("assistant") == 2
    assert tokenizer.encode(tokenizer.decode(one, skip_special=False)) == one, "no token is added"
    assert max(three) < tokenizer.size == tiny.VOCABULARY
    assert len(tokenizer.fingerprint()) == 64


def test_tokenizer_without_a_chat_template_is_refused(tmp_path):
    inner = tiny.byte_tokenizer()
    inner.chat_template = None
    inner.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(tmp_path)


def test_verifier_scores_are_float32_over_the_real_ids():
    model = tiny.build_tiny("llama", seed=0).to(torch.bfloat16).requires_grad_(False)
    verifier = Verifier(model, vocab_size=tiny.VOCABULARY, end_ids=())
    scores_V = verifier.logits(verifier.prefill([5, 6], verifier.new_cache(4)))
    assert scores_V.dtype == torch.float32
    assert scores_V.shape == (tiny.VOCABULARY,)
