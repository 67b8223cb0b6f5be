"""What a plan reads of a profile: shapes, and the settings of its stages that memory and time hang on.

The sections belong to the stages, who check them whole; here every value that is read is checked for its type, and what
is not there is as the stages take it. A list of names is the profile's own (`plan.lists`) where it is not selected.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from ruamel.yaml import YAML

from stages.common import store
from stages.common.params import PARAMS, Count, Natural, NonNegative, ParamError, Share, checked, keys_at, load, raw
from stages.plan.shapes import PROJECTIONS, Shape, of_config
from stages.plan.work import Assumed, Gpu

T = TypeVar("T")
FACTS = Path(__file__).with_name("facts.yaml")
LISTS = ("benchmarks", "methods", "objectives", "soft_objectives", "features", "baselines")
LISTS += ("sweeps", "sizes", "reasoning", "graded")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`<profile>.plan`: the GPUs it is planned for, and the lists at the top of params.yaml that it wants."""

    gpu: Literal["a100", "h100", "h200"]
    count: Count
    lists: dict[str, tuple[str, ...]]
    own: bool = True  # written in params.yaml

    def __post_init__(self) -> None:
        if set(self.lists) != set(LISTS):
            raise ValueError(f"lists: names {', '.join(self.lists)}; it must be these: {', '.join(LISTS)}")


@dataclass(frozen=True, kw_only=True)
class Lora:
    rank: Count
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := set(self.targets) - set(PROJECTIONS):
            raise ValueError(f"targets: {sorted(unknown)} are not among {', '.join(PROJECTIONS)}")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    processes: Count
    strategy: Literal["ddp", "fsdp2"]
    checkpoint_activations: bool


SECTIONS: dict[str, type[Lora] | type[Parallel]] = {"lora": Lora, "parallel": Parallel}  # in a training section


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training section. windows and window: of a causal baseline there are none."""

    steps: Natural
    sequences: Count
    accumulation: Count
    max_tokens: Count
    optimizer: Literal["adamw", "muon"]
    evaluate_every: Count
    windows: Count = 1
    window: Count = 1
    lora: Lora | None = None
    parallel: Parallel | None = None


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    max_new_tokens: Count
    batch_size: Count
    keep_layers: tuple[int, ...]
    processes: Count = 1
    tensor_parallel: Natural = 0  # of vLLM; 0: transformers
    memory_share: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Validation:
    share: Share
    windows: Count


@dataclass(frozen=True, kw_only=True)
class Shared:
    max_new_tokens: Count
    repeats: Count
    yardstick_every: Count
    yardstick_tokens: Count


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a method verifies and how often it drafts in a cycle."""

    drafter: str | None = None
    gamma: Count = 1
    drafts: Count = 1
    steps: Count = 1
    nodes: Natural = 0
    lookup: Natural = 0

    @property
    def verified(self) -> int:
        """Nodes of a proposal, at most."""
        return (self.nodes or self.gamma * self.drafts) + self.lookup


@dataclass(frozen=True, kw_only=True)
class Placement:
    verifier: Literal["one", "auto", "tp"] = "one"
    drafter: str = ""


@dataclass(frozen=True, kw_only=True)
class Adapt:
    layers: tuple[int, ...]
    prefix: str
    draft_vocab: Natural
    start: Literal["verifier", "drafter"] = "verifier"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything of a profile that a plan stands on."""

    name: str
    plan: Plan
    number: int  # bytes of a number in passes
    placement: Placement
    verifier: Shape
    foreign: Shape | None  # a drafter that somebody else trained
    texts: dict[str, int]  # prompts of the corpus, and of each benchmark
    longest_prompt: int
    trajectories: Trajectories
    validation: Validation
    adapt: Adapt
    adapting: Training
    distilling: Training
    shared: Shared

    @property
    def drafter(self) -> Shape:
        """What adapt leaves: the foreign drafter, or the verifier's kept layers."""
        return self.foreign or self.verifier.cut(len(self.adapt.layers))

    @property
    def draft_words(self) -> int:
        return min(self.adapt.draft_vocab or self.drafter.vocab, self.drafter.vocab)

    def names(self, which: str) -> tuple[str, ...]:
        """One of the lists this profile is planned with."""
        return self.plan.lists[which]


def read(profile: str) -> Profile:
    """ParamError names the key that is missing or of another type."""
    device, models = raw(profile, "device"), raw(profile, "models")
    downloads, chosen = raw(profile, "download"), raw(profile, "trajectories")
    engine = chosen.get("engine")
    vllm = dict(engine) if isinstance(engine, Mapping) else {}
    texts = {"corpus": _limits(downloads["corpus"]["parts"])}
    texts |= {name: _limits(node["splits"]) for name, node in downloads["benchmarks"].items()}
    folder, drafter = store.verifier_folder(profile), models.get("drafter")
    return Profile(
        name=profile,
        plan=plan_of(profile),
        number=4 if device["dtype"] == "float32" else 2,
        placement=pick(Placement, device.get("placement") or {}, f"{profile}.device.placement"),
        verifier=shape_of(folder, models["verifier"], f"{profile}.models.verifier"),
        foreign=drafter and shape_of(folder.with_name("drafter"), drafter, f"{profile}.models.drafter"),
        texts=texts,
        longest_prompt=downloads["corpus"]["max_prompt_tokens"],
        trajectories=pick(Trajectories, {**chosen, **vllm}, f"{profile}.trajectories"),
        validation=pick(Validation, raw(profile, "validation"), f"{profile}.validation"),
        adapt=pick(Adapt, raw(profile, "adapt"), f"{profile}.adapt"),
        adapting=training_of(profile, "adapt", "training"),
        distilling=training_of(profile, "distill", "training"),
        shared=pick(Shared, raw(profile, "evaluate", "shared"), f"{profile}.evaluate.shared"),
    )


def plan_of(profile: str) -> Plan:
    """The profile's own section; without one, one A100 and the lists at the top of params.yaml."""
    if "plan" in keys_at(profile):
        return load(Plan, profile, "plan")
    return Plan(gpu="a100", count=1, lists={name: tuple(keys_at(name)) for name in LISTS}, own=False)


def training_of(*keys: str) -> Training:
    return pick(Training, raw(*keys), ".".join(keys))


def method_of(profile: str, name: str) -> Method:
    return pick(Method, raw(profile, "evaluate", name), f"{profile}.evaluate.{name}")


def pick(cls: type[T], node: Any, key: str) -> T:
    """The fields of `cls` out of a section that has others, too."""
    if not isinstance(node, Mapping):
        raise ParamError(f"{PARAMS}: {key}: {node!r} is not a section of names")
    hints, values = get_type_hints(cls, include_extras=True), {}
    for field in fields(cls):  # pyright: ignore[reportArgumentType]
        if field.name in node:
            value, place = node[field.name], f"{key}.{field.name}"
            section = SECTIONS.get(field.name)
            if section is None or value is None:
                values[field.name] = checked(hints[field.name], value, place)
            else:
                values[field.name] = pick(section, value, place)
        elif field.default is MISSING:
            raise ParamError(f"{PARAMS}: {key}.{field.name}: missing; add it to this section")
    return cls(**values)


def shape_of(folder: Path, model: Mapping[str, Any], key: str) -> Shape:
    """Of the model's config.json where its folder is there, else of the table in facts.yaml, else of a tiny model."""
    if (folder / "config.json").exists():
        return of_config(store.read_json(folder / "config.json"))
    if model["source"] == "tiny":
        return tiny_shape(model)
    name, known = model.get("repo") or model.get("member"), facts()["shapes"]
    if name not in known:
        raise ParamError(
            f"{PARAMS}: {key}: the shape of {name} is not known; copy the numbers of its config.json into {FACTS.name} "
            "beside stages/plan, or run dvc repro models first"
        )
    return of_config(known[name])


def tiny_shape(model: Mapping[str, Any]) -> Shape:
    """As stages/common/tiny.py builds it."""
    return of_config(
        {
            "model_type": model["kind"],
            "hidden_size": model["width"],
            "num_hidden_layers": model["layers"],
            "num_attention_heads": model["heads"],
            "num_key_value_heads": model["key_heads"],
            "intermediate_size": 2 * model["width"],
            "vocab_size": model["vocab"],
            "tie_word_embeddings": model.get("tied", False),
        }
    )


def facts() -> dict[str, Any]:
    """facts.yaml."""
    return YAML(typ="safe").load(FACTS.read_text(encoding="utf-8"))


def gpus() -> dict[str, Gpu]:
    return {name: Gpu(**node) for name, node in facts()["gpus"].items()}


def assumed() -> Assumed:
    return Assumed(**facts()["assumed"])


def _limits(parts: Mapping[str, Any]) -> int:
    return sum(part["limit"] for part in parts.values())
