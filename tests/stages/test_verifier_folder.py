"""The verifier folder: tiny models and the conversion from GGUF."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.common import convert, store, tiny
from stages.common.models import end_ids_of
from stages.common.tokenizers import load_tokenizer

KINDS = [(kind, tied) for kind in ("llama", "qwen2", "gemma") for tied in (True, False)]


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_tiny_model_survives_the_folder(tmp_path, kind, tied):
    model = tiny.build_tiny(kind, seed=3, tied=tied)
    tiny.save_tiny(tmp_path / "a", model)
    tiny.save_tiny(tmp_path / "b", tiny.build_tiny(kind, seed=3, tied=tied))
    assert store.sha256_folder(tmp_path / "a") == store.sha256_folder(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    shared = again.lm_head.weight.data_ptr() == again.get_input_embeddings().weight.data_ptr()
    assert shared == tied
    ids = torch.arange(12)[None] * 17
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert end_ids_of(tmp_path / "a") == sorted(tiny.END_IDS)


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_greedy_text_of_a_tiny_model_is_not_a_constant(kind, tied):
    model = tiny.build_tiny(kind, seed=1, tied=tied)
    ids = [1, 60, 99]
    with torch.no_grad():
        for _ in range(40):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert len(set(ids[3:])) > 10


def test_tiny_sizes_are_checked():
    with pytest.raises(ValueError, match="heads must divide"):
        tiny.build_tiny("llama", seed=0, width=30, heads=4)


def test_byte_tokenizer_keeps_every_text(tmp_path):
    tiny.save_tiny(tmp_path, tiny.build_tiny("llama", seed=0))
    inner = AutoTokenizer.from_pretrained(tmp_path)
    text = "Hé <x>\n\t😀  'a' \x00"
    ids = inner(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert inner.decode(ids) == text
    assert len(inner) == tiny.VOCABULARY


def test_prompt_has_one_header(tmp_path):
    tiny.save_tiny(tmp_path, tiny.build_tiny("llama", seed=0))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode_prompt(["hello"])
    text = tokenizer.decode(ids, skip_special=False)
    assert text.count("<|im_start|>system") == 1
    assert text.startswith("<|im_start|>system")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert [i for i in ids if i < 3] == [1, 2, 1, 2, 1]  # start and end of two turns, start of the third


def test_conversion_checks_the_end_tokens(tmp_path):
    model, tokenizer = tiny.build_tiny("llama", seed=0), tiny.byte_tokenizer()
    model.config.eos_token_id = 2
    with pytest.raises(ValueError, match=r"end_tokens.*<eos>"):
        convert.save(model, tokenizer, tmp_path, end_tokens=["<eos>"])
    with pytest.raises(ValueError, match=r"lacks '<\|im_end\|>'"):
        convert.save(model, tokenizer, tmp_path, end_tokens=["<|endoftext|>"])
    convert.save(model, tokenizer, tmp_path, end_tokens=["<|im_end|>", "<|endoftext|>"])
    assert end_ids_of(tmp_path) == [0, 2]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        convert.save(model, tokenizer, tmp_path, end_tokens=["<|im_end|>"])


def test_a_broken_gguf_is_named(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ValueError, match=r"broken\.gguf"):
        convert.load_gguf(broken)
