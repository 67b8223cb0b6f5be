"""The masked-diffusion drafter: a depth-pruned causal body that also reads mask rows and speaks a draft vocabulary.

    rows      prefix rows are causal; window rows see the prefix and one another (kernels/window.py)
    prefix    "own": the drafter runs the prefix through its own layers and caches it.
              "verifier": layer i reads the keys and values that the verifier cached at layer `layers[i]`, which it was
              cut from. The prefix is then seen by the whole verifier, and costs the drafter nothing. The pending token
              is not in that cache yet, so every pass runs it as a row of its own.
              "bidirectional": as diffusion models are published, prefix and window all see one another. Nothing can
              be cached: every pass runs the whole text.
    mask      one trained embedding, id `mask_id` = first id beyond the verifier's vocabulary; never proposed
    head      V_d draft words: d2t[d] is the verifier's id of draft word d, t2d[t] its inverse, -1 where there is none
    embedding the verifier's own, frozen and shared; it is not stored again

A drafter folder holds `config.json` (of the pruned body), `model.safetensors` and `drafter.json`, and the files of an
adapter if it has one (lora.py).

`ForeignDrafter` is a published diffusion model (foreign.py) with words of its own (translate.py). Its folder names the
base it stands on, and holds weights only where training moved them: all of them, or a LoRA adapter.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kernels.cache import KVCache, LentCache
from kernels.window import bidirectional_mask, decoding_mask
from stages.common import foreign, lora
from stages.common.models import Cache, CausalModel, can_pack, empty_body, pack_linears, pruned_body
from stages.common.translate import Words, load_words, save_words

Prefix = Literal["own", "verifier", "bidirectional"]
BASE = "models/drafter"  # of a foreign drafter, under data/<profile>/


@dataclass(frozen=True, kw_only=True)
class DrafterCard:
    """drafter.json. Field names as in DFlash configurations where they exist."""

    kind: str  # "masked_window"
    block_size: int  # G
    mask_token_id: int
    steps: int  # denoising steps it was trained for
    shift: str  # "left": row i speaks for token i + 1
    prefix: Prefix  # whose keys and values of the prefix it reads
    layers: tuple[int, ...]  # the verifier's layers it was cut from
    verifier_tokenizer: str  # hash of the id-to-token map
    verifier_config: str  # hash of the verifier's config.json
    vocab_size: int
    draft_vocab_size: int
    parameters: int  # trained numbers
    objective: str
    provenance: dict[str, Any]
    # Of a foreign drafter; not written of others.
    base: str = ""  # whose weights it stands on
    embedding: Literal["verifier", "own"] = "verifier"
    tokenizer: Literal["verifier", "own"] = "verifier"  # own: other ids than the verifier's for ordinary words


class Drafter(CausalModel):
    """q_1 .. q_G from one pass over [new committed tokens, G - 1 masks] behind the cached prefix.

    layers: of the verifier, that it was cut from and, with prefix "verifier", reads the cache of.
    """

    tokenizer: Literal["verifier", "own"] = "verifier"

    def __init__(
        self, body: Any, *, d2t: Tensor, vocab_size: int, layers: Sequence[int], prefix: Prefix = "own"
    ) -> None:
        super().__init__(body)
        self.layers = tuple(layers)
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.mask_id = vocab_size
        self.mask_embedding = nn.Parameter(torch.zeros(self.width))
        self.lm_head: nn.Module = nn.Linear(self.width, len(d2t), bias=False)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", d2t, persistent=False)
        t2d = torch.full((vocab_size,), -1, device=d2t.device)
        t2d[d2t] = torch.arange(len(d2t), device=d2t.device)
        self.register_buffer("t2d", t2d, persistent=False)

    def read(self, ids: Sequence[int]) -> Sequence[int]:
        """The rows of a text of the verifier's ids: what `draft` takes, and what it trains on."""
        return ids

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of ids, `mask_id` included."""
        masked = ids == self.mask_id
        words = self.body.embed_tokens(ids.masked_fill(masked, 0)).to(self.dtype)
        return torch.where(masked[..., None], self.mask_embedding.to(self.dtype), words)

    def forward(self, ids_BN: Tensor, positions_BN: Tensor, sees: Tensor, cache: Cache | None = None) -> Tensor:
        return self.rows(self.embed(ids_BN), positions_BN, sees, cache)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Float32 scores over the draft vocabulary (ids of `d2t`, not the verifier's)."""
        return self.lm_head(hidden_XD).float()

    def trained(self) -> list[nn.Parameter]:
        """Everything but the shared embedding; of a drafter with an adapter, that and the mask embedding (lora.py)."""
        names = {name: p for name, p in self.named_parameters() if not name.startswith("body.embed_tokens")}
        return [p for name, p in names.items() if not lora.attached(self) or lora.trains(name)]

    @torch.inference_mode()
    def extend(self, new: Sequence[int], cache: KVCache) -> None:
        """Cache committed tokens without drafting (the prompt, or a text another method wrote)."""
        self.window(new, torch.empty(0, dtype=torch.long), cache)
        cache.keep(list(range(len(new))))

    @torch.inference_mode()
    def draft(self, new: Sequence[int], window: int, cache: KVCache | LentCache | None) -> Tensor:
        """Scores [G, V_d] of the next G tokens behind cache + `new`, which a cache of its own keeps.

        Without a cache (prefix bidirectional) `new` is the whole text.
        """
        assert new
        assert window >= 1
        hidden_1ND = self.window(new, torch.full((window - 1,), self.mask_id), cache)
        if isinstance(cache, KVCache):
            cache.keep(list(range(len(new))))
        return self.logits(hidden_1ND[0, len(new) - 1 :])

    def window(self, new: Sequence[int], rows_S: Tensor, cache: KVCache | LentCache | None) -> Tensor:
        """Hidden states [1, N + S, D] of N new tokens and S window rows (masks, and words where they are revealed)."""
        cached = 0 if cache is None else cache.length
        ids = torch.cat([torch.tensor(new, dtype=torch.long), rows_S.cpu()])[None].to(self.device)
        positions = torch.arange(cached, cached + ids.shape[1], device=self.device)[None]
        if cache is None:
            assert self.prefix == "bidirectional"
            sees = bidirectional_mask(rows=ids.shape[1], device=self.device)
        else:
            sees = decoding_mask(cached=cached, new=len(new), window_rows=len(rows_S), device=self.device)
        return self(ids, positions, sees, cache)


class ForeignDrafter(Drafter):
    """A drafter with an embedding, a head and words of its own; texts reach it as rows (`read`).

    head: over its whole vocabulary; only rows of words the verifier has are ever scored, so q is normalised over them.
    """

    moved = False  # whether its weights beside an adapter are others than the base's

    def __init__(self, causal_lm: Any, *, words: Words, mask: int, prefix: Prefix) -> None:
        CausalModel.__init__(self, causal_lm.model)
        assert prefix != "verifier"
        self.layers, self.prefix, self.map = (), prefix, words
        self.tokenizer = "verifier" if words.same else "own"
        self.vocab_size = self.mask_id = len(words.own_V)
        self.lm_head = causal_lm.lm_head
        own = causal_lm.config.vocab_size
        own_R = torch.cat([words.own_V.clamp(min=0), torch.tensor([mask]), torch.arange(own)])
        t2d_R = torch.full((len(own_R),), -1)
        t2d_R[words.d2t_Vd] = torch.arange(len(words.d2t_Vd))
        self.own_R: Tensor
        self.words_Vd: Tensor
        for name, table in (("d2t", words.d2t_Vd), ("t2d", t2d_R), ("own_R", own_R), ("words_Vd", words.words_Vd)):
            self.register_buffer(name, table.to(self.device), persistent=False)

    def read(self, ids: Sequence[int]) -> list[int]:
        return [row for id_ in ids for row in self.map.read(id_)]

    def embed(self, ids: Tensor) -> Tensor:
        return self.body.embed_tokens(self.own_R[ids]).to(self.dtype)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        return self.lm_head(hidden_XD)[..., self.words_Vd].float()

    def trained(self) -> list[nn.Parameter]:
        """All it has, its embedding (with the row of the mask) too; of one with an adapter, that."""
        return [p for name, p in self.named_parameters() if not lora.attached(self) or lora.trains(name)]


def prune(causal_lm: Any, *, layers: Sequence[int], d2t: Tensor, vocab_size: int, prefix: Prefix = "own") -> Drafter:
    """A drafter cut from the verifier: kept layers, its final norm, its head's rows for the draft words.

    The mask embedding starts at the mean word. At j = 1 the untrained drafter with every layer and every word *is* the
    verifier (a test).
    """
    drafter = Drafter(pruned_body(causal_lm, layers), d2t=d2t, vocab_size=vocab_size, layers=layers, prefix=prefix)
    assert isinstance(drafter.lm_head, nn.Linear)
    with torch.no_grad():
        drafter.mask_embedding.copy_(causal_lm.get_input_embeddings()(d2t).float().mean(0))
        drafter.lm_head.weight.copy_(causal_lm.lm_head.weight.float()[d2t])
    return drafter


def save_drafter(folder: Path, drafter: Drafter, card: DrafterCard) -> None:
    """Write its files into an existing, empty folder; of a foreign drafter weights only where training moved them."""
    if isinstance(drafter, ForeignDrafter):
        _save_foreign(folder, drafter, trained=card.provenance["steps"] > 0)
    else:
        state = {k: v.contiguous() for k, v in drafter.state_dict().items() if not k.startswith("body.embed_tokens")}
        if lora.attached(drafter):
            lora.save(folder, drafter)
            state = lora.base_of(state)
        state |= {"d2t": drafter.d2t, "t2d": drafter.t2d}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(drafter.body.config.to_json_string())
    defaults = {field.name: field.default for field in fields(DrafterCard)}
    said = {name: value for name, value in asdict(card).items() if value != defaults[name]}
    (folder / "drafter.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")


def read_card(folder: Path) -> DrafterCard:
    path = folder / "drafter.json"
    if not path.exists():
        raise ValueError(f"{path}: no drafter here; run `dvc repro adapt distill baselines`")
    fields = json.loads(path.read_text())
    return DrafterCard(**{**fields, "layers": tuple(fields["layers"])})


def load_drafter(
    folder: Path,
    *,
    embedding: nn.Module | None,
    tokenizer: str,
    config: str,
    dtype: torch.dtype,
    device: str = "cpu",
    packed: bool = True,
) -> tuple[Drafter, DrafterCard]:
    """A saved drafter over the verifier's embedding, or (None will do) a foreign one over its own.

    `tokenizer`: the verifier's fingerprint, which must be the card's. `config`: of its configuration (`config_digest`),
    which must be too if the drafter reads the verifier's cache. packed: for decoding alone; an adapter is merged then.
    """
    card = read_card(folder)
    if card.verifier_tokenizer != tokenizer:
        raise ValueError(
            f"{folder}: this drafter was trained for another tokenizer than the verifier's; train it again"
        )
    if card.prefix == "verifier" and card.verifier_config != config:
        raise ValueError(f"{folder}: this drafter reads the cache of another verifier than this one; train it again")
    if card.embedding == "own":
        return _load_foreign(folder, card, dtype=dtype, device=device, packed=packed), card
    assert embedding is not None
    state = load_file(folder / "model.safetensors")
    d2t, _ = state.pop("d2t"), state.pop("t2d")
    body = empty_body(json.loads((folder / "config.json").read_text()), embedding)
    drafter = Drafter(body, d2t=d2t, vocab_size=card.vocab_size, layers=card.layers, prefix=card.prefix)
    missing, unexpected = drafter.load_state_dict(state, strict=False)
    if unexpected or any(not name.startswith("body.embed_tokens") for name in missing):
        raise ValueError(f"{folder}/model.safetensors: lacks {missing} and has {unexpected} too many; train it again")
    if lora.saved(folder):
        lora.load(drafter, folder)
        if packed:  # for decoding
            lora.merge(drafter)
    drafter = drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)
    if packed and can_pack(device, dtype):
        pack_linears(drafter)
    return drafter, card


def _save_foreign(folder: Path, drafter: ForeignDrafter, *, trained: bool) -> None:
    save_words(folder, drafter.map)
    if lora.attached(drafter):
        lora.save(folder, drafter)
    if drafter.moved or (trained and not lora.attached(drafter)):
        state = {k: v.contiguous() for k, v in lora.base_of(drafter.state_dict()).items()}
        if drafter.body.config.tie_word_embeddings:
            state.pop("lm_head.weight")
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _load_foreign(folder: Path, card: DrafterCard, *, dtype: torch.dtype, device: str, packed: bool) -> ForeignDrafter:
    """`packed`, for drafting alone: drafters of one base share its weights in memory (but for packed CPU layers)."""
    base = foreign.base_of(folder, card.base)
    if foreign.digest(base) != card.provenance["sha256"]["base"]:
        raise ValueError(f"{folder}: this drafter stands on other weights than {base} has now; train it again")
    whole = folder / "model.safetensors"
    if whole.exists():
        state = {
            name.replace("body.", "model.", 1): value.to(device, dtype) for name, value in load_file(whole).items()
        }
    else:
        load = foreign.shared_weights if packed else foreign.weights_of
        state = load(base, dtype=dtype, device=device)
    causal_lm = foreign.model_of(foreign.config_of(base), state)
    mask = foreign.read_layout(base).mask_token_id
    drafter = ForeignDrafter(causal_lm, words=load_words(folder), mask=mask, prefix=card.prefix)
    drafter.moved = whole.exists()
    if lora.saved(folder):
        lora.load(drafter, folder)
        drafter = drafter.to(device=device, dtype=dtype)
    elif packed and can_pack(device, dtype):
        pack_linears(drafter)
    return drafter.eval().requires_grad_(False)
