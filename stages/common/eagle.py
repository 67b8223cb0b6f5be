"""EAGLE's drafting heads: one decoder layer over the verifier's states and the words that followed them.

    row t    fc [embedding of x_(t+1), state g_t] -> decoder layer -> norm -> state_(t+1), which speaks for x_(t+2)

    kind     g_t                                        its state is trained to be    scores
    eagle    f_t, what the verifier's head reads at t   f_(t+1), and to name x_(t+2)  the verifier's own frozen head
    eagle3   three layers' states at t, fused to D      free: to name x_(t+2) alone   its own head, draft vocabulary

Mind the shift of one: a row joins the state at one token with the *next* token, which is what makes the drawn word
known to it. Behind the committed text the verifier has no state yet, and g_t is the head's own state of row t - 1.

EAGLE: arXiv 2401.15077, section 4. EAGLE-3: arXiv 2503.01840, section 3. Here the fed-back state is the one behind the
head's last norm, in both: it is what its scores are read from.

Letters: B texts, N rows, D the verifier's width, C columns of features, V_d draft words.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from kernels.cache import KVCache
from stages.common.bodies import Cache
from stages.common.features import Taps
from stages.common.heads import Head
from stages.common.models import CausalModel, Verifier, empty_body


class OneLayer(Head):
    """What both heads are: a decoder layer of the verifier's kind. `layer`: the one of the verifier it starts from."""

    def __init__(self, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, layer: int) -> None:
        super().__init__(verifier, reads=reads, d2t=d2t)
        if not 1 <= layer < verifier.num_layers:
            raise ValueError(f"layer {layer}: write a layer of the verifier, 1 to {verifier.num_layers - 1}")
        self.layer = layer
        self.fc = nn.Linear(2 * verifier.width, verifier.width, bias=False)
        self.decoder = CausalModel(_one_layer(verifier, layer))

    @classmethod
    def build(cls, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, **settings: Any) -> Self:
        return cls(verifier, reads=reads, d2t=d2t, **settings)

    def settings(self) -> dict[str, Any]:
        return {"layer": self.layer}

    def new_cache(self, capacity: int) -> KVCache:
        return self.decoder.new_cache(capacity)

    def fuse(self, features_XC: Tensor) -> Tensor:
        """g [X, D] of what the verifier's layers said at some tokens."""
        raise NotImplementedError

    def logits(self, states_XD: Tensor) -> Tensor:
        """Float32 scores [X, V_d] of the word behind each row's."""
        raise NotImplementedError

    def forward(
        self, words_BN: Tensor, states_BND: Tensor, positions_BN: Tensor, sees: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """States [B, N, D] behind rows that join g_t with x_(t+1), the verifier's id."""
        rows_BND = self.fc(torch.cat([self.embed(words_BN).to(states_BND.dtype), states_BND], -1))
        return self.decoder.rows(rows_BND, positions_BN, sees, cache)

    @torch.no_grad()
    def begin(self, ids: Sequence[int]) -> None:
        """Take the verifier's layer and last norm; fc adds its two inputs at equal size.

        Their sum is as large as what that layer is given in the text `ids` (root mean square, of the median token: a
        text's first token is often far off). The verifier must not be packed.
        """
        body = self.verifier.body
        self.decoder.body.layers[0].load_state_dict(body.layers[self.layer].state_dict())
        self.decoder.body.norm.load_state_dict(body.norm.state_dict())
        given, _ = self._sizes(ids)
        word = _size(self.embed(torch.tensor([ids], device=self.device)))
        eye_DD = torch.eye(self.verifier.width, device=self.device)
        self.fc.weight.copy_(torch.cat([eye_DD / word, eye_DD / self._state_size()], 1) * given / 2**0.5)

    def _sizes(self, ids: Sequence[int]) -> tuple[float, list[float]]:
        """Sizes of what `layer` is given and of the layers it reads, in this text."""
        taps = Taps(self.verifier.body, (self.layer - 1, *self.reads))
        try:
            self.verifier.prefill(ids, self.verifier.new_cache(len(ids)))
            taps.keep()
            given, *read = [_size(rows_TD) for rows_TD in taps.rows().split(self.verifier.width, -1)]
        finally:
            taps.close()
        return given, read

    def _state_size(self) -> float:
        """Size of a row behind the last norm."""
        return _size(self.verifier.body.norm(torch.ones(1, self.verifier.width, device=self.device)))


class EagleHead(OneLayer):
    """EAGLE and EAGLE-2: every word, through the verifier's own head."""

    kind = "eagle"

    @property
    def lm_head(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.verifier.lm_head

    def fuse(self, features_XC: Tensor) -> Tensor:
        return features_XC

    def logits(self, states_XD: Tensor) -> Tensor:
        return self.verifier.logits(states_XD)


class Eagle3Head(OneLayer):
    """EAGLE-3: a low, a middle and a high layer; the words of `d2t`."""

    kind = "eagle3"

    def __init__(self, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, layer: int) -> None:
        super().__init__(verifier, reads=reads, d2t=d2t, layer=layer)
        self.fusion = nn.Linear(len(reads) * verifier.width, verifier.width, bias=False)
        self.lm_head: nn.Module = nn.Linear(verifier.width, len(d2t), bias=False)

    def fuse(self, features_XC: Tensor) -> Tensor:
        return self.fusion(features_XC)

    def logits(self, states_XD: Tensor) -> Tensor:
        return self.lm_head(states_XD).float()

    @torch.no_grad()
    def begin(self, ids: Sequence[int]) -> None:
        """As above; the layers read are added at equal size, and the head is the verifier's at the draft words."""
        super().begin(ids)
        assert isinstance(self.lm_head, nn.Linear)
        assert isinstance(self.verifier.lm_head, nn.Linear)
        self.lm_head.weight.copy_(self.verifier.lm_head.weight[self.d2t])
        _, read = self._sizes(ids)
        share, eye_DD = self._state_size() / len(read) ** 0.5, torch.eye(self.verifier.width, device=self.device)
        self.fusion.weight.copy_(torch.cat([eye_DD * share / size for size in read], 1))


def _one_layer(verifier: Verifier, layer: int) -> Any:
    """An untrained body of one layer that is fed rows, not ids; settings listed layer by layer are that layer's.

    It sees the whole text even where the verifier's layer slides: in training and in a growing tree its rows do not
    stand in a cache by their places.
    """
    config = verifier.body.config.to_dict()
    for name, value in config.items():
        if "layer" in name and isinstance(value, list) and len(value) == verifier.num_layers:
            config[name] = [value[layer]]
    if config.get("sliding_window") is not None:
        config["sliding_window"] = None
    return empty_body(config | {"num_hidden_layers": 1}, nn.Identity())


def _size(rows_XD: Tensor) -> float:
    return float(rows_XD.float().pow(2).mean(-1).sqrt().median())
