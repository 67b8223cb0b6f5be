"""Numbers of a decoder from its config.json alone: parameters, bytes of a cached token, of a row kept for backward.

Letters: D width, H heads, J key heads, d head size, I inner width, V vocabulary, L layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BIASED = ("qwen2", "dream")  # model types whose query, key and value projections have a bias
QK_NORMS = ("qwen3", "gemma3", "gemma3_text")  # whose queries and keys go through a norm of their own
FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")  # that normalise behind attention and MLP, too
TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")  # whose head is the embedding unless the file says otherwise
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder of transformers with a gated MLP and, at most, biases on queries, keys and values."""

    layers: int
    width: int
    heads: int
    key_heads: int
    head_size: int
    inner: int
    vocab: int
    tied: bool
    vectors: int  # numbers of a layer that are no matrix: norms and biases

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every weight matrix of a layer."""
        queries, keys = self.heads * self.head_size, self.key_heads * self.head_size
        sizes = [(self.width, queries), (self.width, keys), (self.width, keys), (queries, self.width)]
        sizes += [(self.width, self.inner), (self.width, self.inner), (self.inner, self.width)]
        return dict(zip(PROJECTIONS, sizes, strict=True))

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of a layer."""
        return sum(rows * columns for rows, columns in self.matrices().values())

    @property
    def body(self) -> int:
        """Parameters of all layers and the last norm, without embedding and head."""
        return self.layers * (self.layer_matrices + self.vectors) + self.width

    @property
    def embedding(self) -> int:
        return self.vocab * self.width

    @property
    def parameters(self) -> int:
        return self.body + self.embedding * (1 if self.tied else 2)

    def cache_bytes(self, *, number: int, layers: int | None = None) -> int:
        """Bytes of one cached token; `number`: of one number."""
        kept = self.layers if layers is None else layers
        return 2 * kept * self.key_heads * self.head_size * number

    def cut(self, layers: int) -> "Shape":
        """The same with so many layers."""
        return Shape(**{**self.__dict__, "layers": layers})


def of_config(config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json describes. ValueError: a number is missing."""
    kind = str(config.get("model_type", "")).lower()
    try:
        width, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
        inner, vocab = config["intermediate_size"], config["vocab_size"]
    except KeyError as error:
        raise ValueError(f"a model of type {kind!r} without {error} in its config.json cannot be planned for") from None
    key_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or width // heads
    vectors = width * (4 if kind in FOUR_NORMS else 2)
    if kind in BIASED or config.get("attention_bias"):
        vectors += (heads + 2 * key_heads) * head_size
        vectors += width if config.get("attention_bias") else 0
    if kind in QK_NORMS:
        vectors += 2 * head_size
    tied = config.get("tie_word_embeddings")
    return Shape(
        layers=layers,
        width=width,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        inner=inner,
        vocab=vocab,
        tied=kind in TIED if tied is None else bool(tied),
        vectors=vectors,
    )
