"""A small masked block drafter whose context is the verifier's own hidden states (after DFlash, arXiv 2602.06036).

    context   row t holds the verifier's states at token t, of the layers it reads, each scaled to unit mean square,
              fused to width D by one linear layer and a norm. Layer i makes key and value of it with its own input norm
              and projections; context rows are never run through the layers, so a token costs next to nothing.
    rows      the pending token's embedding, whose states nobody has yet, and G - 1 rows of one trained mask embedding.
              All see the whole context; mask rows see one another and the pending row, which sees itself alone.
    shift     left: the pending row speaks for x_1, mask row j for x_(j+1)
    weights   layers, last norm and head's rows start from the verifier's; the fuse starts as the mean of what it reads

Letters: B texts, T context rows, C columns of states, N rows of a pass, D width, L layers, H key heads, E head width,
G window, V_d draft words.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import KVCache
from kernels.window import decoding_mask
from stages.common.bodies import Cache
from stages.common.heads import Head
from stages.common.models import CausalModel, Verifier, empty_body

KNOWN = ("gemma", "llama", "qwen2")  # whose attention layers make keys and values as `keys_values` does (a test)


def rotate(x_BHTE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) with number e of the first half paired with number e of the second."""
    first, second = x_BHTE.chunk(2, -1)
    return x_BHTE * cos_BTE[:, None] + torch.cat([-second, first], -1) * sin_BTE[:, None]


def keys_values(layer: Any, rows_BTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> tuple[Tensor, Tensor]:
    """What a decoder layer caches of rows that it is given: keys, rotated, and values, both [B, H, T, E]."""
    attention, normed_BTD = layer.self_attn, layer.input_layernorm(rows_BTD)
    key, value = (
        project(normed_BTD).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.k_proj, attention.v_proj)
    )
    return rotate(key, cos_BTE, sin_BTE), value


class FedDrafter(Head):
    """q_1 .. q_G from one pass of [pending token, G - 1 masks] behind the cached context.

    start_layers: the verifier's layers whose weights its own start from; () for random ones.
    """

    kind = "fed"
    prefix = "verifier"  # what a window sees of its text is made of the verifier's states

    def __init__(
        self, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, layers: int, start_layers: tuple[int, ...]
    ) -> None:
        super().__init__(verifier, reads=reads, d2t=d2t)
        self.start_layers = start_layers
        self.decoder = CausalModel(_body(verifier, layers, start_layers))
        width = self.decoder.width
        self.mask_id = self.vocab_size
        self.mask_embedding = nn.Parameter(torch.empty(width))
        self.fuse = nn.Linear(len(reads) * width, width, bias=False)
        self.fuse_norm = nn.RMSNorm(width, eps=self.decoder.body.config.rms_norm_eps)
        self.lm_head: nn.Module = nn.Linear(width, len(d2t), bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p.zero_()  # until `initialise` or a saved state fills them

    @classmethod
    def build(
        cls, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, layers: int, start_layers: Sequence[int]
    ) -> Self:
        """All zero: `initialise` gives the weights to train from."""
        return cls(verifier, reads=tuple(reads), d2t=d2t, layers=layers, start_layers=tuple(start_layers))

    def settings(self) -> dict[str, Any]:
        return {"layers": self.decoder.num_layers, "start_layers": list(self.start_layers)}

    @torch.no_grad()
    def initialise(self, *, seed: int) -> None:
        """The weights to train from, of a verifier that is not packed. Random matrices are keyed by the seed."""
        verifier, body = self.verifier, self.decoder.body
        assert isinstance(verifier.lm_head, nn.Linear), "a packed verifier has no weights to start from"
        assert isinstance(self.lm_head, nn.Linear)
        g = torch.Generator().manual_seed(seed)
        for layer, source in zip(body.layers, _sources(len(body.layers), self.start_layers), strict=True):
            layer.load_state_dict(verifier.body.layers[source].state_dict())
            if not self.start_layers:
                for p in layer.parameters():
                    if p.ndim == 2:
                        p.copy_(torch.randn(p.shape, generator=g) * p.shape[1] ** -0.5)
        body.norm.load_state_dict(verifier.body.norm.state_dict())
        words = self.d2t.to(verifier.device)
        self.mask_embedding.copy_(verifier.embed(words).float().mean(0))
        self.lm_head.weight.copy_(verifier.lm_head.weight[words])
        self.fuse.weight.copy_(torch.eye(self.decoder.width).repeat(1, len(self.reads)) / len(self.reads))
        self.fuse_norm.weight.fill_(1.0)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of ids, `mask_id` included."""
        masked = ids == self.mask_id
        words = self.verifier.embed(ids.masked_fill(masked, 0)).to(self.dtype)
        return torch.where(masked[..., None], self.mask_embedding, words)

    def context(self, features_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        """[L, 2, B, H, T, E]: what each layer sees of tokens with these states, at these places. Differentiable."""
        states = features_BTC.to(self.dtype).unflatten(-1, (len(self.reads), -1))
        fused_BTD = self.fuse_norm(self.fuse(F.rms_norm(states, states.shape[-1:]).flatten(-2)))
        cos_BTE, sin_BTE = self.decoder.body.rotary_emb(fused_BTD, positions_BT)
        made = [keys_values(layer, fused_BTD, cos_BTE, sin_BTE) for layer in self.decoder.body.layers]
        return torch.stack([torch.stack(pair) for pair in made])

    def forward(self, ids_BN: Tensor, positions_BN: Tensor, sees: Tensor, cache: Cache | None = None) -> Tensor:
        return self.decoder.rows(self.embed(ids_BN), positions_BN, sees, cache)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Float32 scores over the draft vocabulary (ids of `d2t`, not the verifier's)."""
        return self.lm_head(hidden_XD).float()

    def new_cache(self, capacity: int) -> KVCache:
        return self.decoder.new_cache(capacity)

    @torch.inference_mode()
    def extend(self, features_TC: Tensor, cache: KVCache) -> None:
        """Cache the context of the next committed tokens."""
        count = len(features_TC)
        if count == 0:
            return
        places_T = torch.arange(cache.length, cache.length + count, device=self.device)
        for layer, (key, value) in enumerate(self.context(features_TC[None].to(self.device), places_T[None])):
            cache.update(key, value, layer)
        cache.keep(list(range(count)))

    @torch.inference_mode()
    def draft(self, pending: int, window: int, cache: KVCache) -> Tensor:
        """Scores [G, V_d] of the next G tokens. The cache holds every token before the pending one, and stays so."""
        assert window >= 1
        ids = torch.tensor([[pending, *[self.mask_id] * (window - 1)]], device=self.device)
        places = torch.arange(cache.length, cache.length + window, device=self.device)
        sees = decoding_mask(cached=cache.length, new=1, window_rows=window - 1, device=self.device)
        hidden_1GD = self(ids, places[None], sees, cache)
        cache.keep([])
        return self.logits(hidden_1GD[0])


def _sources(layers: int, start_layers: Sequence[int]) -> Sequence[int]:
    """The verifier's layer that each of the drafter's takes its form from."""
    return start_layers or range(layers)


def _body(verifier: Verifier, layers: int, start_layers: Sequence[int]) -> Any:
    """Decoder layers of the verifier's form, without an embedding; settings listed by layer are their sources'."""
    config = verifier.body.config.to_dict()
    total, sources = config["num_hidden_layers"], _sources(layers, start_layers)
    if config["model_type"] not in KNOWN:
        raise ValueError(
            f"fed: how {config['model_type']} makes keys is not known here; use a verifier of {', '.join(KNOWN)}"
        )
    if len(sources) != layers or any(not 0 <= source < total for source in sources):
        raise ValueError(
            f"fed: start_layers {list(start_layers)} for {layers} layers: write as many layers of the verifier, 0 to "
            f"{total - 1}, or [] for random weights (then at most {total} layers)"
        )
    for name, value in config.items():
        if "layer" in name and isinstance(value, list) and len(value) == total:
            config[name] = [value[source] for source in sources]
    return empty_body(config | {"num_hidden_layers": layers}, nn.Identity())
