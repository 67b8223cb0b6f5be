"""A GGUF file, read by transformers and written once as a float32 HF folder.

Later stages then load safetensors in a second instead of dequantising for 40, and read every end id from one
place: the GGUF tokenizer of SmolLM2 reports end id 1 while the model ends turns with 2.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def convert_gguf(gguf: Path, folder: Path, *, end_tokens: Sequence[str]) -> None:
    """Write model, tokenizer and generation settings of `gguf` into `folder`."""
    model, tokenizer = load_gguf(gguf)
    save(model, tokenizer, folder, end_tokens=end_tokens)


def load_gguf(gguf: Path) -> tuple[Any, Any]:
    """transformers' own reading of a GGUF file: the model in float32, and its tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)  # else it is read twice, for seconds
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, config=config, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{gguf.name}: transformers cannot read this GGUF file: {reason}") from error
    return model.eval(), tokenizer


def save(model: Any, tokenizer: Any, folder: Path, *, end_tokens: Sequence[str]) -> None:
    """Write an HF folder of plain float32 weights; a tied head stays tied.

    end_tokens: every token that ends a text. The model's own end id must be among them.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; choose an instruction-tuned model")
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in end_tokens if token not in vocabulary]:
        raise ValueError(f"models.verifier.end_tokens: {unknown} not in the vocabulary; correct the list")
    end_ids = sorted(vocabulary[token] for token in end_tokens)
    own = model.config.eos_token_id
    if own is not None and own not in end_ids:
        token = tokenizer.convert_ids_to_tokens(own)
        raise ValueError(f"models.verifier.end_tokens: lacks {token!r}, the model's own end; add it")
    _forget_quantisation(model)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=end_ids, pad_token_id=model.config.pad_token_id
    )
    model.config.name_or_path = ""  # it would carry a path of this machine
    tokenizer.padding_side = "right"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantisation(model: Any) -> None:
    """The weights were dequantised on loading; without this they would be marked as packed."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
