"""A verifier of a family that the tests do not know is held against transformers' own scores when it is loaded.

A short text is read by the model as transformers runs it, and again by ours: a prefix in chunks, then the rest in one
pass in which the last token stands twice, as two nodes of a tree. What a family does beyond this project's
understanding of it (a scale, a sink, a bias by position) shows as a difference, and the model is refused.
"""

from typing import Any

import torch
from torch import Tensor

TESTED = frozenset(
    {"cohere", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3"}
)
PREFIX, BLOCK = 7, 5
TOLERANCE = {torch.float32: 1e-3}  # of the scores' size
COARSE = 0.1  # in narrower formats


@torch.inference_mode()
def expected(causal_lm: Any) -> Tensor | None:
    """transformers' own scores [T, V] of the probe's text; None for a family that the tests cover."""
    if causal_lm.config.model_type in TESTED:
        return None
    causal_lm.set_attn_implementation("eager")
    ids_T = _text(causal_lm.config.vocab_size)
    return causal_lm(input_ids=ids_T[None].to(causal_lm.device), use_cache=False).logits[0].float().cpu()


@torch.inference_mode()
def check(verifier: Any, expected_TV: Tensor | None) -> None:
    """ValueError unless the verifier's scores are those expected."""
    if expected_TV is None:
        return
    family = verifier.body.config.model_type
    wanted_TV = torch.cat([expected_TV, expected_TV[-1:]])[PREFIX - 1 :, : verifier.vocab_size]
    try:
        found_TV = _scores(verifier, _text(expected_TV.shape[1])).cpu()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{family}: cannot be run with a tree of drafts ({error}); use {_known()}") from error
    difference = float((found_TV - wanted_TV).norm() / wanted_TV.norm())
    if not difference <= TOLERANCE.get(verifier.dtype, COARSE):
        raise ValueError(
            f"{family}: scores are {difference:.0%} off transformers' own, so this family does something that is not "
            f"built here; use {_known()}"
        )


def _scores(verifier: Any, ids_T: Tensor) -> Tensor:
    """[BLOCK + 2, V] behind the prefix, and behind each row of the tree."""
    cache, device = verifier.new_cache(PREFIX), verifier.device
    last_D = verifier.prefill(ids_T[:PREFIX].tolist(), cache, chunk=4)
    rows = torch.cat([ids_T[PREFIX:], ids_T[-1:]]).to(device)
    places = torch.tensor([*range(PREFIX, PREFIX + BLOCK), PREFIX + BLOCK - 1], device=device)
    sees = torch.ones(BLOCK + 1, PREFIX + BLOCK + 1, dtype=torch.bool, device=device).tril(PREFIX)
    sees[-1, -2] = False  # its twin
    hidden_1ND = verifier(rows[None], places[None], sees, cache)
    return verifier.logits(torch.cat([last_D[None], hidden_1ND[0]]))


def _text(vocab: int) -> Tensor:
    return (torch.arange(1, PREFIX + BLOCK + 1) * 7919) % vocab


def _known() -> str:
    return f"a model of {', '.join(sorted(TESTED))}"
