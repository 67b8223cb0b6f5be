"""Tiny random verifiers and a byte-level tokenizer: whole-pipeline tests without a download.

`build_tiny` gives Llama, Qwen2, Qwen3, Mistral, Gemma and Gemma 3 models, tied or untied heads, grouped or not, in
float32. All layers of Mistral slide, of Gemma 3 all but the last, over WINDOW places: fewer than a test's texts have.
Every weight comes from one seeded generator in the order of parameter names, so a folder has the same bytes on every
machine. The scales keep greedy texts lively: at transformers' own initialisation a tied head repeats the last token for
ever, which hides errors of position. Numbers measured on these models mean nothing.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as hf_logging

hf_logging.disable_progress_bar()

Kind = Literal["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3"]
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma": GemmaConfig,
    "gemma3": Gemma3TextConfig,
}
WINDOW = 6

# The layout of SmolLM2's vocabulary: special tokens first, then (here) the 256 bytes.
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)
END_IDS = (0, 2)
VOCABULARY = len(SPECIALS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe brief<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tiny(
    kind: Kind,
    *,
    seed: int,
    tied: bool = True,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    key_heads: int = 2,
    vocab: int = VOCABULARY + 5,
    context: int = 256,
) -> Any:
    """A random causal LM of transformers in float32, evaluation mode.

    `vocab` may exceed the tokenizer's 259 ids: the rows above are phantoms that must never be emitted.
    """
    if width % heads or heads % key_heads or (width // heads) % 2:
        raise ValueError(
            f"tiny model: width {width}, heads {heads}, key_heads {key_heads}: heads must divide width into "
            "an even head size, key_heads must divide heads"
        )
    further: dict[str, Any] = {}
    if kind in ("mistral", "gemma3"):
        further = {"sliding_window": WINDOW}
    if kind == "gemma3":
        slides = ["sliding_attention"] * (layers - 1)
        further |= {"query_pre_attn_scalar": width // heads, "layer_types": [*slides, "full_attention"]}
    config = CONFIGS[kind](
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=width // heads,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=list(END_IDS),
        pad_token_id=2,
        dtype="float32",
        **further,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 2:
                weight.normal_(0.0, _scale(name, weight, width), generator=generator)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.2, generator=generator)
    model.generation_config = _generation_config()
    return model.eval()


def _scale(name: str, weight: torch.Tensor, width: int) -> float:
    if "embed_tokens" in name or "lm_head" in name:
        return 2.0 / math.sqrt(width)
    # Layer outputs outweigh the embedding in the residual stream: a tied head does not echo its input.
    gain = 3.0 if "o_proj" in name or "down_proj" in name else 1.5
    return gain / math.sqrt(weight.shape[1])


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Three special tokens and the 256 bytes; every text survives the round trip."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=TURN_START,
        eos_token=TURN_END,
        pad_token=TURN_END,
        unk_token=END_OF_TEXT,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tiny(folder: Path, model: Any) -> None:
    """Write model and byte tokenizer as an HF folder."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


MASK = "<|mask|>"
SHARDS = 2
CONFIG_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)


def save_published(folder: Path, model: Any, *, mask_token_id: int) -> None:
    """Write a model as diffusion drafters are published: Qwen2's as Dream, LLaMA's as DiffuLLaMA; in two shards.

    mask_token_id: that of a token `<|mask|>` behind the byte tokenizer's, or of a word borrowed as mask.
    """
    if mask_token_id > VOCABULARY:
        raise ValueError(f"mask_token_id: {mask_token_id}: at most {VOCABULARY}, the first id that is no byte's")
    said = {name: getattr(model.config, name) for name in CONFIG_FIELDS}
    said |= {"rope_theta": model.config.rope_parameters["rope_theta"], "rope_scaling": None, "use_cache": False}
    if model.config.model_type == "qwen2":
        said |= {"model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": mask_token_id}
        said |= {"auto_map": {"AutoModel": "modeling_dream.DreamModel"}, "use_sliding_window": False}
        state = dict(model.state_dict())
    else:
        said |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        state = {_diffullama(name): value for name, value in model.state_dict().items()}
    (folder / "config.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    where = {name: f"model-{1 + n % SHARDS:05}-of-{SHARDS:05}.safetensors" for n, name in enumerate(sorted(state))}
    for file in sorted(set(where.values())):
        part = {name: state[name].contiguous() for name in where if where[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}, indent=1) + "\n")
    tokenizer = byte_tokenizer()
    if mask_token_id == VOCABULARY:
        tokenizer.add_special_tokens({"mask_token": MASK})
    tokenizer.save_pretrained(folder)


def _diffullama(name: str) -> str:
    if name.startswith("model.embed_tokens."):
        return name.removeprefix("model.")
    return name.replace("model.", "denoise_model.", 1) if name.startswith("model.") else name


def _generation_config() -> GenerationConfig:
    return GenerationConfig(bos_token_id=1, eos_token_id=list(END_IDS), pad_token_id=2)
