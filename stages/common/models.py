"""Verifiers, drafters and tokenizers: the only place that imports transformers for work.

`CausalModel` runs any causal LM of transformers over explicit rows: ids or embeddings, positions, a boolean attention
pattern and a `KVCache`. `Verifier` adds the head and what stops a text. `Drafter` is a depth-pruned copy of the
verifier that reads mask rows and speaks a draft vocabulary (`d2t` / `t2d`, as in EAGLE-3).

Letters: B batch, N rows, T rows seen, V vocabulary, D width.
"""

import hashlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as hf_logging

from kernels.cache import FixedCache, KVCache, LentCache, RaggedKVCache
from kernels.window import additive, causal_mask
from stages.common.hub import local_folder

Cache = KVCache | RaggedKVCache | LentCache | FixedCache  # what attention layers may be given: they ask for `update`
HEAD_SETTINGS = {"logits_scaling": 1, "logit_scale": 1, "final_logit_softcapping": None}  # of a plain linear head
ATTENTION = "grouped_sdpa"
hf_logging.disable_progress_bar()


def grouped_attention(
    module: Any,
    q_BHND: Tensor,
    k_BJTD: Tensor,
    v_BJTD: Tensor,
    bias: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with the query heads of one key head packed as rows: keys are never copied.

    q has H heads, k and v have J; head h reads key head h // (H / J). The bias, [B or 1, 1, (H / J) N, T], is packed
    the same way, once a pass and not once a layer (`CausalModel.rows`).
    """
    B, H, N, D = q_BHND.shape
    J, group = k_BJTD.shape[1], H // k_BJTD.shape[1]
    out = F.scaled_dot_product_attention(
        q_BHND.reshape(B, J, group * N, D), k_BJTD, v_BJTD, attn_mask=bias, scale=scaling
    )
    return out.reshape(B, H, N, D).transpose(1, 2), None


AttentionInterface.register(ATTENTION, grouped_attention)


class PackedLinear(nn.Module):
    """A frozen linear layer in oneDNN's blocked layout: its weights are read once a pass, not repacked by every one.

    On CPUs a plain float32 product with 2 to 16 rows costs about twice one row; packed it costs 1.1 to 1.6 times.
    """

    def __init__(self, linear: nn.Linear, *, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(module: nn.Module, *, rows: int = 16) -> None:
    """Replace every linear layer below `module` by its packed twin (CPU, inference only)."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child, rows=rows))
        else:
            pack_linears(child, rows=rows)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """The number format of a profile.

    `auto` is bfloat16 where the processor multiplies it in hardware, else float32.
    """
    if name == "float32":
        return torch.float32
    if name == "bfloat16":
        return torch.bfloat16
    if name != "auto":
        raise ValueError(f"device.dtype: {name!r} is none of auto, float32, bfloat16")
    fast = device != "cpu" or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _cache_keyword(model: nn.Module) -> str:
    """transformers 5.24 renamed the argument `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


class CausalModel(nn.Module):
    """A decoder body of transformers, run over explicit rows. What a pass remembers is in the cache it is given."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        sliding = getattr(body.config, "layer_types", None) or ()
        if any(kind != "full_attention" for kind in sliding):
            raise ValueError(
                f"{body.config.model_type}: layers of kind {sorted(set(sliding))} need a mask per layer, which tree "
                "verification does not build yet; use a model whose layers all attend fully"
            )
        body.set_attn_implementation(ATTENTION)
        self.body = body
        self.group = body.config.num_attention_heads // body.config.num_key_value_heads
        self.num_layers: int = body.config.num_hidden_layers
        self.context_limit: int = body.config.max_position_embeddings
        self._cache_keyword = _cache_keyword(body)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As any module moves, but for the rotary frequencies: rounded ones would turn far places by wrong angles."""
        exact = dict(self.body.rotary_emb.named_buffers())
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            setattr(self.body.rotary_emb, name, frequencies.to(self.device))
        return self

    @property
    def width(self) -> int:
        return self.body.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.body.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.body.norm.weight.device

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(layers=self.num_layers, capacity=capacity)

    def rows(self, embeds_BND: Tensor, positions_BN: Tensor, sees: Tensor, cache: Cache | None = None) -> Tensor:
        """Last hidden states [B, N, D] of N rows.

        sees: bool [N, T] or [B, N, T], T the cached rows and then the rows of this pass.
        """
        bias = additive(sees, embeds_BND.dtype)
        bias_B1NT = bias[None, None] if bias.dim() == 2 else bias[:, None]
        packed = bias_B1NT.repeat(1, 1, self.group, 1)
        kwargs = {self._cache_keyword: cache, "use_cache": cache is not None}
        out = self.body(inputs_embeds=embeds_BND, attention_mask=packed, position_ids=positions_BN, **kwargs)
        return out.last_hidden_state


class Tokenizer:
    """The verifier's tokenizer and what the rest of the project asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inner = AutoTokenizer.from_pretrained(folder)
        if self._inner.chat_template is None:
            raise ValueError(f"{folder}: the tokenizer has no chat template; add chat_template.jinja to the folder")
        self.size = len(self._inner)

    def encode_prompt(self, turns: Sequence[str]) -> list[int]:
        """Ids of the chat so far (user and assistant in turn) up to the place where the assistant speaks.

        Rendered and tokenised in one call, so that a beginning-of-text id never comes twice.
        """
        roles = ("user", "assistant")
        chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        ids = self._inner.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        return [int(i) for i in ids]

    def encode(self, text: str) -> list[int]:
        """Ids of a text that already carries its special tokens; none are added."""
        return [int(i) for i in self._inner(text, add_special_tokens=False)["input_ids"]]

    def user_turn_prefix(self) -> list[int]:
        """Ids of a chat up to the place where the user speaks (the bare template of Magpie, arXiv 2406.08464)."""
        marker = "\u2063user-turn\u2063"
        text = self._inner.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
        if marker not in text:
            raise ValueError(f"{self.folder}: the chat template rewrites what the user says")
        return self.encode(text[: text.index(marker)])

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=skip_special)

    def fingerprint(self) -> str:
        """Hash of the id-to-token map: two models speak the same ids only where it is equal."""
        vocabulary = sorted(self._inner.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


class Verifier(CausalModel):
    """The model whose distribution is kept: body, head in float32 scores, vocabulary of real ids, end ids."""

    def __init__(self, causal_lm: Any, *, vocab_size: int, end_ids: Sequence[int]) -> None:
        super().__init__(causal_lm.model)
        config = causal_lm.config
        for name, plain in HEAD_SETTINGS.items():
            if getattr(config, name, plain) != plain:
                raise ValueError(
                    f"{config.model_type}: {name} is {getattr(config, name)}: a head that scales or caps its scores is "
                    "not built yet; use a model with a plain linear head"
                )
        self.lm_head: nn.Module = causal_lm.lm_head
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)

    def embed(self, ids_BN: Tensor) -> Tensor:
        return self.body.embed_tokens(ids_BN)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Float32 scores over the tokenizer's real ids. Padded rows of the head can never be emitted."""
        return self.lm_head(hidden_XD)[..., : self.vocab_size].float()

    def forward(self, ids_BN: Tensor, positions_BN: Tensor, sees: Tensor, cache: Cache | None = None) -> Tensor:
        return self.rows(self.embed(ids_BN), positions_BN, sees, cache)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], cache: KVCache, *, chunk: int = 512) -> Tensor:
        """Append a text to the cache; hidden state [D] of its last token. Long prompts go in chunks."""
        if not ids:
            raise ValueError("an empty prompt has no last token to continue from")
        hidden = torch.empty(0)
        for start in range(0, len(ids), chunk):
            part = torch.tensor([list(ids[start : start + chunk])], device=self.device)
            count, cached = part.shape[1], cache.length
            positions = torch.arange(cached, cached + count, device=self.device)[None]
            hidden = self(part, positions, causal_mask(cached=cached, new=count, device=self.device), cache)
            cache.keep(list(range(count)))
        return hidden[0, -1]


def end_ids_of(folder: Path) -> list[int]:
    """Every id that ends a text: the model's generation settings, which name more than the tokenizer does."""
    try:
        ids = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        ids = AutoConfig.from_pretrained(folder).eos_token_id
    if ids is None:
        return []
    return sorted({int(i) for i in (ids if isinstance(ids, list | tuple) else [ids])})


class Sizes(NamedTuple):
    """What a model's configuration says, without its weights."""

    context_limit: int
    vocab: int  # rows of the head, those beyond the tokenizer's ids included


def sizes_of(folder: Path) -> Sizes:
    config = AutoConfig.from_pretrained(local_folder(folder)).get_text_config()
    return Sizes(config.max_position_embeddings, config.vocab_size)


def config_digest(folder: Path) -> str:
    """Hash of a model's configuration: tells two models apart without reading their weights."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def load_causal_lm(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' own model of a local folder, frozen and in evaluation mode."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: no model here (no config.json); run `dvc repro` to make it")
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return causal_lm.eval().requires_grad_(False)


def load_verifier(folder: Path, *, dtype: torch.dtype, device: str = "cpu", packed: bool = True) -> Verifier:
    """The verifier of a local HF folder. `packed` trades 10 s and a second layout for faster CPU passes."""
    causal_lm = load_causal_lm(folder, dtype).to(device)
    vocab_size = min(len(AutoTokenizer.from_pretrained(folder)), causal_lm.config.vocab_size)
    verifier = Verifier(causal_lm, vocab_size=vocab_size, end_ids=end_ids_of(folder)).eval()
    if packed and can_pack(device, dtype):
        pack_linears(verifier)
    return verifier


def can_pack(device: str, dtype: torch.dtype) -> bool:
    """Whether oneDNN's blocked layout is there for this device and number format."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pruned_body(causal_lm: Any, layers: Sequence[int]) -> Any:
    """A fresh body that keeps these layers of a model, in this order, and shares its (frozen) input embedding.

    Settings that a configuration lists layer by layer (`layer_types`, SmolLM3's `no_rope_layers`) are those of the
    layers kept.
    """
    config = causal_lm.config.to_dict()
    total = config["num_hidden_layers"]
    if not layers or any(not 0 <= layer < total for layer in layers):
        raise ValueError(f"adapt.layers: {list(layers)} must be layers of the verifier, 0 to {total - 1}")
    for name, value in config.items():
        if "layer" in name and isinstance(value, list) and len(value) == total:
            config[name] = [value[layer] for layer in layers]
    body = empty_body(config | {"num_hidden_layers": len(layers)}, causal_lm.model.embed_tokens)
    for new, old in zip(body.layers, layers, strict=True):
        new.load_state_dict(causal_lm.model.layers[old].state_dict())
    body.norm.load_state_dict(causal_lm.model.norm.state_dict())
    return body


def empty_body(config: dict[str, Any], embedding: nn.Module) -> Any:
    """A decoder body of this configuration with untrained layers, over another model's input embedding."""
    config = dict(config)
    typed = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        body = AutoModelForCausalLM.from_config(typed, attn_implementation="sdpa").model
    rotary = type(body.rotary_emb)(config=typed)
    body = body.to_empty(device="cpu").float()
    body.rotary_emb = rotary
    body.embed_tokens = embedding
    return body
