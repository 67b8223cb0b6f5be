"""Decoder bodies of transformers as this project runs them: their attention, its window by layer, their text part.

Layers of a body are of one kind or of two: those that attend fully, and those that slide, whose rows see the last
`sliding_window` places of their text and no more. Place is position: a node of a tree stands at the depth of its path.

Letters: B batch, N rows, T rows seen, H query heads, J key heads, D head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from kernels.cache import FixedCache, KVCache, LentCache, RaggedKVCache

Cache = KVCache | RaggedKVCache | LentCache | FixedCache  # what attention layers may be given: they ask for `update`
ATTENTION = "grouped"  # not "sdpa": transformers refuses such names where its own would lack a cap
FULL, SLIDING = "full_attention", "sliding_attention"
PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")  # of a body
UNBUILT = ("s_aux", "sinks", "position_bias")  # arguments that change scores, and that `grouped_attention` lacks


def grouped_attention(
    module: Any,
    q_BHND: Tensor,
    k_BJTD: Tensor,
    v_BJTD: Tensor,
    bias: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with the query heads of one key head packed as rows: keys are never copied.

    q has H heads, k and v have J; head h reads key head h // (H / J). The bias, [B or 1, 1, (H / J) N, T], is packed
    the same way, once a pass and not once a layer (`CausalModel.rows`). softcap: scores are c tanh(score / c).
    """
    if wrong := [name for name in UNBUILT if others.get(name) is not None]:
        raise ValueError(f"attention with {', '.join(wrong)} is not built yet; use a model without")
    B, H, N, D = q_BHND.shape
    J, group = k_BJTD.shape[1], H // k_BJTD.shape[1]
    packed = q_BHND.reshape(B, J, group * N, D)
    if softcap is None:
        out = F.scaled_dot_product_attention(packed, k_BJTD, v_BJTD, attn_mask=bias, scale=scaling)
    else:
        scores = softcap * torch.tanh(packed @ k_BJTD.transpose(2, 3) * scaling / softcap)
        scores = scores if bias is None else scores + bias
        out = scores.softmax(-1, dtype=torch.float32).to(v_BJTD.dtype) @ v_BJTD
    return out.reshape(B, H, N, D).transpose(1, 2), None


AttentionInterface.register(ATTENTION, grouped_attention)


def layer_kinds(config: Any) -> list[str]:
    """FULL or SLIDING for each layer of a decoder. ValueError for layers that are neither."""
    listed = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) is not None
    kinds = list(listed or [SLIDING if slides else FULL] * config.num_hidden_layers)
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ValueError(
            f"{config.model_type}: layers of kind {', '.join(unknown)} are not built: tree verification needs layers "
            f"of kind {FULL} or {SLIDING}; use a model of these"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(f"{config.model_type}: attends in both directions, so it continues no text; use another model")
    return kinds


def nearby(sees: Tensor, positions_BN: Tensor, window: int, cache: Cache | None) -> Tensor:
    """Of what each row sees, bool [N, T] or [B, N, T], what lies within `window` places, itself included: [B, N, T].

    The columns are the cached rows, at the places 0, 1, .. of their text, and then the rows of this pass; in a ragged
    cache a row of the pass is found at its own place. (A drafter that caches a tree level by level has rows behind
    their places there: it sees that much further.)
    """
    B, N = positions_BN.shape
    T = sees.shape[-1]
    if isinstance(cache, RaggedKVCache):
        place_BT = torch.arange(T, device=sees.device).expand(B, -1)
    else:
        place_BT = torch.cat([torch.arange(T - N, device=sees.device).expand(B, -1), positions_BN], 1)
    return sees & (positions_BN[:, :, None] - place_BT[:, None] < window)


def reach(config: Any) -> int:
    """Places that a text may have: those whose rotary frequencies do not depend on how long the text becomes."""
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    short = [
        int(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
        for scaling in scalings
        if scaling.get("rope_type") == "longrope"
    ]
    return min([config.max_position_embeddings, *short])


def check_parts(body: Any) -> None:
    """ValueError unless this is a decoder in the layout that everything here relies on."""
    if missing := [part for part in PARTS if not hasattr(body, part)]:
        raise ValueError(
            f"{type(body).__name__} has no {', '.join(missing)}: only decoders laid out as {', '.join(PARTS)} are run "
            "(Llama, Qwen, Gemma, Mistral and their like); use one of those"
        )


def text_part(causal_lm: Any) -> Any:
    """The language model alone of one that also sees or hears; any other as it is."""
    inner = getattr(getattr(causal_lm, "model", None), "language_model", None)
    if inner is None:
        return causal_lm
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(inner.config)
    text.model, text.lm_head = inner, causal_lm.lm_head
    text.generation_config = causal_lm.generation_config
    if devices := getattr(causal_lm, "hf_device_map", None):
        text.hf_device_map = {name.replace("model.language_model", "model"): at for name, at in devices.items()}
    return text
