"""Verifiers and what drafters are cut from: causal LMs of transformers, run over explicit rows.

`CausalModel` runs a decoder body over ids or embeddings, positions, a boolean attention pattern and a `KVCache`.
`Verifier` adds the head and what stops a text. Where layers lie on several devices, rows enter and scores leave at the
embedding's (`CausalModel.device`).

Letters: B batch, N rows, T rows seen, V vocabulary, D width.
"""

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as hf_logging

from kernels.cache import KVCache
from kernels.spread import SplitKVCache
from kernels.window import additive, causal_mask
from stages.common import bodies, hub, probe, spread
from stages.common.bodies import ATTENTION, SLIDING, Cache, check_parts, nearby
from stages.common.entry import Placement
from stages.common.packing import can_pack, pack_linears
from stages.common.tokenizers import load_tokenizer

hf_logging.disable_progress_bar()


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
    """A decoder body of transformers, run over explicit rows. What a pass remembers is in the cache it is given.

    split: where its layers compute, if that is not one device.
    """

    def __init__(self, body: Any, *, split: spread.Split | None = None) -> None:
        super().__init__()
        check_parts(body)
        kinds = bodies.layer_kinds(body.config)
        body.set_attn_implementation(ATTENTION)
        self.body = body
        self.split = split
        self.group = body.config.num_attention_heads // body.config.num_key_value_heads
        self.num_layers: int = body.config.num_hidden_layers
        self.context_limit: int = bodies.reach(body.config)
        self._kinds = sorted(set(kinds))
        self._window: int | None = body.config.sliding_window if SLIDING in kinds else None
        self._by_kind = SLIDING in kinds and getattr(body.config, "layer_types", None) is not None
        self._cache_keyword = _cache_keyword(body)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As any module moves, but for what is computed once, such as rotary frequencies: it is never rounded.

        Rounded frequencies would turn far places by wrong angles.
        """
        exact = {name: buffer for name, buffer in self.body.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            owner, _, own_name = name.rpartition(".")
            setattr(self.body.get_submodule(owner), own_name, buffer.to(self.device))
        return self

    @property
    def width(self) -> int:
        return self.body.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.body.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.body.norm.weight.device if self.split is None else self.split.home

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that it computes on, once."""
        return (self.device,) if self.split is None else tuple(dict.fromkeys((self.split.home, *self.split.layers)))

    def new_cache(self, capacity: int) -> KVCache:
        if self.split is not None:
            return SplitKVCache(self.split.layers, capacity=capacity)
        return KVCache(layers=self.num_layers, capacity=capacity)

    def rows(self, embeds_BND: Tensor, positions_BN: Tensor, sees: Tensor, cache: Cache | None = None) -> Tensor:
        """Last hidden states [B, N, D] of N rows.

        sees: bool [N, T] or [B, N, T], T the cached rows and then the rows of this pass.
        """
        masks: dict[str, Tensor] = {}
        for kind in self._kinds:
            near = sees if kind != SLIDING or not self._window else nearby(sees, positions_BN, self._window, cache)
            masks[kind] = self._packed(near, embeds_BND.dtype)
        mask = masks if self._by_kind else masks[self._kinds[0]]
        kwargs = {self._cache_keyword: cache, "use_cache": cache is not None}
        out = self.body(inputs_embeds=embeds_BND, attention_mask=mask, position_ids=positions_BN, **kwargs)
        return out.last_hidden_state

    def _packed(self, sees: Tensor, dtype: torch.dtype) -> Tensor:
        """A pattern as the bias that `grouped_attention` takes."""
        bias = additive(sees, dtype)
        bias_B1NT = bias[None, None] if bias.dim() == 2 else bias[:, None]
        return bias_B1NT.repeat(1, 1, self.group, 1)


class Verifier(CausalModel):
    """The model whose distribution is kept: body, head in float32 scores, vocabulary of real ids, end ids."""

    def __init__(
        self, causal_lm: Any, *, vocab_size: int, end_ids: Sequence[int], split: spread.Split | None = None
    ) -> None:
        super().__init__(getattr(causal_lm, "model", causal_lm), split=split)
        config = causal_lm.config
        self.lm_head: nn.Module = causal_lm.lm_head
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        times, divided_by = (getattr(config, name, None) or 1 for name in ("logit_scale", "logits_scaling"))
        self._scale: float = times / divided_by
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)

    def embed(self, ids_BN: Tensor) -> Tensor:
        return self.body.embed_tokens(ids_BN)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Float32 scores over the tokenizer's real ids. Padded rows of the head can never be emitted."""
        scores_XV = self.lm_head(hidden_XD)[..., : self.vocab_size].float()
        if self.split is not None:
            scores_XV = scores_XV.to(self.device)
        if self._scale != 1:
            scores_XV = scores_XV * self._scale
        return scores_XV if self._cap is None else self._cap * torch.tanh(scores_XV / self._cap)

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
    """Every id that ends a text: the model's generation settings, which name more than the tokenizer does.

    Where they name none the model's configuration does. A model without any runs to the limit of tokens.
    """
    folder = hub.local_folder(folder)
    try:
        ids = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        ids = None
    if ids is None:
        ids = AutoConfig.from_pretrained(folder).get_text_config().eos_token_id
    if ids is None:
        return []
    return sorted({int(i) for i in (ids if isinstance(ids, list | tuple) else [ids])})


class Sizes(NamedTuple):
    """What a model's configuration says, without its weights."""

    context_limit: int
    vocab: int  # rows of the head, those beyond the tokenizer's ids included


def sizes_of(folder: Path) -> Sizes:
    config = AutoConfig.from_pretrained(hub.local_folder(folder)).get_text_config()
    return Sizes(bodies.reach(config), config.vocab_size)


def config_digest(folder: Path) -> str:
    """Hash of a model's configuration: tells two models apart without reading their weights."""
    return hashlib.sha256((hub.local_folder(folder) / "config.json").read_bytes()).hexdigest()


def load_causal_lm(folder: Path, dtype: torch.dtype, *, placement: Placement | None = None) -> Any:
    """transformers' own model of a local folder, frozen and in evaluation mode; the text part of one that also sees.

    `placement` may spread it over several devices; else it is in this machine's memory.
    """
    folder = hub.local_folder(folder)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: no model here (no config.json); run `dvc repro` to make it")
    layout: dict[str, Any] = {}
    if placement is not None and placement.verifier == "auto":
        layout = {"device_map": "auto", "max_memory": spread.max_memory(placement)}
    elif placement is not None and placement.verifier == "tp":
        spread.check_ranks(AutoConfig.from_pretrained(folder).get_text_config())
        layout = {"distributed_config": DistributedConfig(tp_size=spread.world(), tp_plan="auto")}
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **layout)
    return bodies.text_part(causal_lm.eval().requires_grad_(False))


def load_verifier(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    packed: bool = True,
    placement: Placement | None = None,
) -> Verifier:
    """The verifier of a local HF folder. `packed` trades 10 s and a second layout for faster CPU passes.

    `placement` may spread it over several devices of this kind (`<profile>.device.placement`).
    """
    one = placement is None or placement.verifier == "one"
    causal_lm = load_causal_lm(folder, dtype, placement=placement)
    if one:
        causal_lm = causal_lm.to(device)
    expected = probe.expected(causal_lm)
    vocab_size = min(load_tokenizer(folder).size, causal_lm.config.vocab_size)
    split = spread.split_of(causal_lm)
    verifier = Verifier(causal_lm, vocab_size=vocab_size, end_ids=end_ids_of(folder), split=split).eval()
    probe.check(verifier, expected)
    if packed and one and can_pack(device, dtype):
        pack_linears(verifier)
    return verifier


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
        body = AutoModelForCausalLM.from_config(typed).model
    rotary = type(body.rotary_emb)(config=typed)
    body = body.to_empty(device="cpu").float()
    body.rotary_emb = rotary
    body.embed_tokens = embedding
    return body
