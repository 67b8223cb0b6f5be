"""Drafters that read the verifier's hidden states: what they share, and their folder.

    reads     layers of the verifier whose states they are given, side by side (features.py)
    words     d2t[d] is the verifier's id of draft word d, t2d[t] its inverse, -1 where there is none; a head that
              speaks through the verifier's own has them all
    shared    the verifier's embedding and head are used as they are: never trained, never stored again

A folder holds `model.safetensors` and `drafter.json`, whose `settings` build the head again over a verifier.

Letters: V_d draft words, D the verifier's width.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.common.models import Verifier
from stages.common.packing import can_pack, pack_linears


@dataclass(frozen=True, kw_only=True)
class HeadCard:
    """drafter.json. Field names as in DFlash and EAGLE configurations where they exist."""

    kind: str
    target_layer_ids: tuple[int, ...]  # what it reads; -1: behind the verifier's last norm
    settings: dict[str, Any]  # further arguments of its `build`
    verifier_tokenizer: str  # hash of the id-to-token map
    verifier_config: str  # hash of the verifier's config.json
    vocab_size: int
    draft_vocab_size: int
    parameters: int  # trained numbers
    objective: str
    provenance: dict[str, Any]


class Head(nn.Module, ABC):
    """A trained head over a frozen verifier, which is not among its own parameters."""

    kind: ClassVar[str]
    lm_head: nn.Module  # what its scores come from, its own or the verifier's

    def __init__(self, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor) -> None:
        super().__init__()
        self._verifier = (verifier,)  # in a tuple, so that torch does not take it for a part of this module
        self.reads = reads
        self.vocab_size = verifier.vocab_size
        self.context_limit = verifier.context_limit
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", d2t, persistent=False)
        t2d = torch.full((self.vocab_size,), -1, device=d2t.device)
        t2d[d2t] = torch.arange(len(d2t), device=d2t.device)
        self.register_buffer("t2d", t2d, persistent=False)

    @classmethod
    @abstractmethod
    def build(cls, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, **settings: Any) -> Self:
        """An untrained head over a verifier."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What `build` was given beyond verifier, layers and words; JSON values."""

    @property
    def verifier(self) -> Verifier:
        return self._verifier[0]

    def embed(self, ids: Tensor) -> Tensor:
        """The verifier's embeddings of its ids."""
        return self.verifier.embed(ids)

    def trained(self) -> list[nn.Parameter]:
        return list(self.parameters())

    @property
    def device(self) -> torch.device:
        return self.d2t.device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def save_head(folder: Path, head: Head, card: HeadCard) -> None:
    """Write the two files into an existing, empty folder."""
    state = {name: value.contiguous() for name, value in head.state_dict().items()} | {"d2t": head.d2t}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "drafter.json").write_text(json.dumps(asdict(card), indent=1, sort_keys=True) + "\n")


def read_head_card(folder: Path) -> HeadCard:
    path = folder / "drafter.json"
    if not path.exists():
        raise ValueError(f"{path}: no drafter here; run `dvc repro baselines`")
    fields = json.loads(path.read_text())
    return HeadCard(**{**fields, "target_layer_ids": tuple(fields["target_layer_ids"])})


def load_head(
    folder: Path, cls: type[Head], verifier: Verifier, *, tokenizer: str, config: str, packed: bool = True
) -> tuple[Head, HeadCard]:
    """A saved head over the verifier it was trained for, in its number format and on its device.

    `tokenizer`, `config`: the verifier's fingerprint and configuration digest, which must be the card's.
    """
    card = read_head_card(folder)
    if (card.verifier_tokenizer, card.verifier_config) != (tokenizer, config):
        raise ValueError(f"{folder}: this drafter reads the states of another verifier than this one; train it again")
    state = load_file(folder / "model.safetensors")
    head = cls.build(verifier, reads=card.target_layer_ids, d2t=state.pop("d2t"), **card.settings)
    missing, unexpected = head.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ValueError(f"{folder}/model.safetensors: lacks {missing} and has {unexpected} too many; train it again")
    head = head.to(device=verifier.device, dtype=verifier.dtype).eval().requires_grad_(False)
    if packed and can_pack(verifier.device.type, verifier.dtype):
        pack_linears(head)
    return head, card
