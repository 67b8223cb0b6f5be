"""What adapt starts from: layers of the verifier, or a published diffusion drafter; and the texts it is trained on.

verifier    `layers` of it, the head's rows for the `draft_vocab` words its texts use most
drafter     data/<profile>/models/drafter as it is (foreign.py), every word that the verifier has, too (translate.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from stages.common import entry, foreign, store, training, windows
from stages.common.drafters import BASE, Drafter, ForeignDrafter, Prefix, prune
from stages.common.models import config_digest, end_ids_of, load_causal_lm, load_tokenizer, resolve_dtype
from stages.common.params import Natural, ParamError
from stages.common.training import Texts, Training
from stages.common.translate import match
from stages.common.validation import Validation

Source = Literal["verifier", "drafter"]


@dataclass(frozen=True, kw_only=True)
class Adapt:
    """`<profile>.adapt`."""

    start: Source = "verifier"
    layers: tuple[int, ...]  # the verifier's layers that stay; [] of a drafter, which is taken whole
    prefix: Prefix  # whose keys and values of the prefix it reads: its own, or the verifier's; or bidirectional
    draft_vocab: Natural  # most frequent words of the training texts that can be drafted; 0 of a drafter: all
    training: Training

    def __post_init__(self) -> None:
        if self.start == "drafter":
            wrong = {
                "layers": bool(self.layers),
                "draft_vocab": self.draft_vocab > 0,
                "prefix": self.prefix == "verifier",
            }
            if names := [name for name, is_wrong in wrong.items() if is_wrong]:
                raise ValueError(
                    f"{names[0]}: a drafter is taken whole and never reads the verifier's cache; with start: drafter "
                    "write layers: [], draft_vocab: 0 and prefix: own or bidirectional"
                )
        elif self.draft_vocab < 1:
            raise ValueError("draft_vocab: 0 is for start: drafter; write how many words can be drafted")
        elif self.training.steps < 1:
            raise ValueError("training.steps: 0 is for start: drafter: layers of a verifier do not read masks yet")


class Start(NamedTuple):
    drafter: Drafter
    texts: Texts
    digests: dict[str, str]  # of what it was made from
    facts: dict[str, Any]  # for its card


def start(
    profile: str,
    source: Source,
    v: Validation,
    t: Training,
    device: entry.Device,
    *,
    layers: Sequence[int],
    prefix: Prefix,
    draft_vocab: int,
    seed: int,
) -> Start:
    """The untrained drafter, in memory of this machine, and its texts."""
    if source == "drafter":
        return _from_drafter(profile, v, t, device, prefix=prefix, seed=seed)
    folder = store.verifier_folder(profile)
    texts = training.read_texts(profile, t, v, prefix=prefix, layers=layers, seed=seed)
    causal_lm = load_causal_lm(folder, torch.float32)
    tokenizer = load_tokenizer(folder)
    vocab_size = min(tokenizer.size, causal_lm.config.vocab_size)
    d2t = windows.draft_vocabulary(texts.training, size=draft_vocab, vocab_size=vocab_size, always=end_ids_of(folder))
    drafter = prune(causal_lm, layers=layers, d2t=d2t, vocab_size=vocab_size, prefix=prefix)
    digests = {**texts.digests, "verifier": store.sha256_folder(folder)}
    return Start(drafter, texts, digests, _facts(profile, drafter) | {"mask_token_id": drafter.mask_id})


def _from_drafter(
    profile: str, v: Validation, t: Training, device: entry.Device, *, prefix: Prefix, seed: int
) -> Start:
    verifier, base = store.verifier_folder(profile), store.foreign_folder(profile)
    if not base.exists():
        raise ParamError(
            f"params.yaml: {profile}.adapt.start: drafter, but {profile}.models names none; add its source"
        )
    config, layout = foreign.config_of(base), foreign.read_layout(base)
    words = match(
        foreign.verifier_tokens(verifier),
        foreign.drafter_tokens(base),
        vocab_size=min(load_tokenizer(verifier).size, foreign.verifier_rows(verifier)),
        rows=config["vocab_size"],
        mask=layout.mask_token_id,
        end_ids=end_ids_of(verifier),
    )
    # Masters in float32 if they are to move; else as they will draft.
    dtype = torch.float32 if t.steps else resolve_dtype(device.dtype, device.name)
    causal_lm = foreign.model_of(config, foreign.weights_of(base, dtype=dtype, device="cpu"))
    drafter = ForeignDrafter(causal_lm, words=words, mask=layout.mask_token_id, prefix=prefix)
    texts = training.read_texts(profile, t, v, prefix=prefix, layers=(), seed=seed, read=drafter.read)
    digests = {**texts.digests, "verifier": store.sha256_folder(verifier), "base": foreign.digest(base)}
    facts = {"mask_token_id": layout.mask_token_id, "base": BASE, "embedding": "own", "tokenizer": drafter.tokenizer}
    return Start(drafter, texts, digests, _facts(profile, drafter) | facts)


def _facts(profile: str, drafter: Drafter) -> dict[str, Any]:
    folder = store.verifier_folder(profile)
    return {
        "kind": "masked_window",
        "steps": 1,
        "shift": "left",
        "prefix": drafter.prefix,
        "layers": drafter.layers,
        "verifier_tokenizer": load_tokenizer(folder).fingerprint(),
        "verifier_config": config_digest(folder),
        "vocab_size": drafter.vocab_size,
        "draft_vocab_size": len(drafter.d2t),
        "objective": "masked_ce",
    }
