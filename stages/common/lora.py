"""LoRA (arXiv 2106.09685) through peft: a drafter's weights stay, and low-rank matrices beside them are trained.

    W x  ->  W x + (alpha / rank) B A x        A: rank rows, B: rank columns; B starts at 0

Trained are A and B of every linear layer that `targets` names, and the mask embedding, which no verifier has learned.
Norms, head and words stay as they are; `lm_head` may be named among the targets.

Beside a drafter's other files lie adapter_config.json and adapter_model.safetensors in PEFT's own format, for the
causal LM that the drafter is to transformers (`model.layers...`), and mask_embedding.safetensors. The base is not in
them: `model.safetensors`, where the folder has one, holds it under the names of a drafter without an adapter.

Adapters of one base share its weights in memory (`over`). Merging writes new weights and leaves those of the base
alone. It comes before `pack_linears`, which knows plain linear layers only.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.common.params import Count, NonNegative, ParamError

M = TypeVar("M", bound=nn.Module)
CONFIG, WEIGHTS, MASK = "adapter_config.json", "adapter_model.safetensors", "mask_embedding.safetensors"
PREFIX = "base_model.model."  # of every name in WEIGHTS


@dataclass(frozen=True, kw_only=True)
class Lora:
    """`lora` of a training section."""

    rank: Count
    alpha: NonNegative  # the update is scaled by alpha / rank
    targets: tuple[str, ...]  # names that linear layers end in: q_proj, down_proj, lm_head
    merge: bool  # write whole weights at the end; else the adapter

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets: {list(self.targets)}; name linear layers, each once: [q_proj, v_proj]")


def ready(drafter: nn.Module, wanted: Lora | None, *, seed: int) -> None:
    """Make a drafter what a training section asks for, before its weights are told to learn.

    One that has an adapter (of `adapt`, say) goes on with that: all objectives then have one base. Without `lora` in
    the section the adapter is merged and every weight trained. ParamError if the section asks for another adapter.
    """
    if wanted is None:
        merge(drafter)
    elif not attached(drafter):
        attach(drafter, wanted, seed=seed)
    else:
        config = _config(drafter)
        has = (config.r, float(config.lora_alpha), set(config.target_modules))
        if has != (wanted.rank, wanted.alpha, set(wanted.targets)):
            raise ParamError(
                f"params.yaml: lora: the drafter to start from has an adapter of rank {has[0]}, alpha {has[1]:g}, "
                f"targets {sorted(has[2])}, which is trained on; write these, or no lora: then it is merged and every "
                "weight is trained"
            )


def attach(drafter: nn.Module, settings: Lora, *, seed: int) -> None:
    """Give the drafter a fresh adapter, which changes nothing yet. ParamError if a target is none of its layers."""
    from peft import LoraConfig

    linear = {name.rpartition(".")[2] for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
    if unknown := sorted(set(settings.targets) - linear):
        raise ParamError(
            f"params.yaml: lora.targets: the drafter has no linear layer {unknown[0]!r}; there are {sorted(linear)}"
        )
    alpha: Any = settings.alpha
    config = LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=list(settings.targets), task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(drafter, config)


def attached(drafter: nn.Module) -> bool:
    return hasattr(drafter, "peft_config")


def trains(name: str) -> bool:
    """Whether a parameter of this name is trained in a drafter with an adapter."""
    return ".lora_" in name or name == "mask_embedding"


def merge(drafter: nn.Module) -> None:
    """Turn the adapter, if there is one, into weights: new ones, since the base may be another drafter's, too."""
    if attached(drafter):
        _merge(drafter)
        del drafter.peft_config


@contextmanager
def exported(drafter: nn.Module, settings: Lora | None) -> Iterator[None]:
    """Within it the drafter is what `settings.merge` has written down: merged, or as it is."""
    if settings is None or not settings.merge:
        yield
        return
    config, layers = drafter.peft_config, _merge(drafter)
    del drafter.peft_config
    try:
        yield
    finally:
        drafter.peft_config = config
        for name, layer in layers.items():
            _put(drafter, name, layer)


def over(base: M, folder: Path) -> M:
    """A drafter of this base and the adapter of a folder; the base's own tensors, no copies. `base` stays as it is."""
    tensors = {id(tensor): tensor for tensor in [*base.parameters(), *base.buffers()]}
    twin = copy.deepcopy(base, dict(tensors))
    if isinstance(mask := getattr(twin, "mask_embedding", None), Tensor):  # an adapter brings its own
        twin.mask_embedding = nn.Parameter(mask.detach().clone(), requires_grad=False)
    load(twin, folder)
    return twin.eval().requires_grad_(False)


# Files ------------------------------------------------------------------------------------------------------


def saved(folder: Path) -> bool:
    """Whether a drafter's folder has an adapter."""
    return (folder / CONFIG).exists()


def save(folder: Path, drafter: nn.Module) -> None:
    """Write the adapter into an existing folder, byte by byte the same for the same weights."""
    state = {_outer(name): value.contiguous() for name, value in drafter.state_dict().items() if ".lora_" in name}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    _config(drafter).save_pretrained(str(folder))
    config = json.loads((folder / CONFIG).read_text())  # its sets come in any order
    config = {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}
    (folder / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    if isinstance(mask := getattr(drafter, "mask_embedding", None), Tensor):
        save_file({"mask_embedding": mask.detach().contiguous()}, folder / MASK, metadata={"format": "pt"})


def load(drafter: nn.Module, folder: Path) -> None:
    """Attach the adapter of a folder. ValueError if it is not this drafter's."""
    from peft import LoraConfig

    _inject(drafter, LoraConfig.from_pretrained(str(folder)))
    found = load_file(folder / WEIGHTS)
    own = {_outer(name): value for name, value in drafter.state_dict().items() if ".lora_" in name}
    if found.keys() != own.keys() or any(found[name].shape != own[name].shape for name in own):
        different = sorted(found.keys() ^ own.keys()) or [name for name in own if found[name].shape != own[name].shape]
        raise ValueError(f"{folder / WEIGHTS}: the adapter of another drafter than this one (see {different[0]})")
    if (folder / MASK).exists():
        found |= load_file(folder / MASK)
        own["mask_embedding"] = drafter.state_dict()["mask_embedding"]
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(found[name])


def base_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights beside the adapter, under the names of a drafter without one."""
    return {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}


def _outer(name: str) -> str:
    """A name of ours as PEFT writes it."""
    return PREFIX + name.replace("body.", "model.", 1).replace(".default.", ".")


# peft -------------------------------------------------------------------------------------------------------


def _inject(drafter: nn.Module, config: Any) -> None:
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, drafter)


def _config(drafter: nn.Module) -> Any:
    (config,) = drafter.peft_config.values()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return config


def _merge(drafter: nn.Module) -> dict[str, nn.Module]:
    """Put plain linear layers in the place of those with an adapter; the latter, by name."""
    from peft.tuners.lora import LoraLayer

    found: dict[str, Any] = {n: module for n, module in drafter.named_modules() if isinstance(module, LoraLayer)}
    for name, module in found.items():
        base: Any = module.get_base_layer()
        with torch.no_grad():
            weight = base.weight + module.get_delta_weight("default").to(base.weight.dtype)
        plain = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        plain.bias = base.bias
        _put(drafter, name, plain.train(module.training))
    return found


def _put(drafter: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(drafter.get_submodule(parent), child, layer)
