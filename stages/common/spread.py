"""A verifier over several devices: where its layers compute, and the ranks of a tensor-parallel one.

auto   accelerate lays the layers out over the devices, one after the other; what does not fit waits in memory
tp     every rank holds a slice of every layer, by transformers' plan, and runs the whole stage in lockstep: coins
       are keyed, scores are equal on all ranks, and rank 0 alone writes
"""

import os
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn

from stages.common.entry import Placement

WAITING = ("cpu", "disk")  # where accelerate keeps what it brings to a device for each pass


class Split(NamedTuple):
    """Where the parts of a model compute."""

    home: torch.device  # of the embedding, where rows enter
    layers: tuple[torch.device, ...]


def split_of(causal_lm: Any) -> Split | None:
    """Where a model that accelerate has laid out computes; None for one that is in one place."""
    found: dict[str, Any] = getattr(causal_lm, "hf_device_map", None) or {}
    if len(set(found.values())) < 2:
        return None
    main = next((place for place in found.values() if place not in WAITING), "cpu")

    def computes(name: str) -> torch.device:
        owner = max((key for key in found if f"{name}.".startswith(f"{key}." if key else "")), key=len)
        place = main if found[owner] in WAITING else found[owner]
        return torch.device(f"cuda:{place}" if isinstance(place, int) else place)

    layers = [computes(f"model.layers.{layer}") for layer in range(len(causal_lm.model.layers))]
    return Split(computes("model.embed_tokens"), tuple(layers))


def max_memory(placement: Placement) -> dict[int | str, str] | None:
    """The limits of a layout as accelerate wants them: devices by number."""
    limits = {int(name) if name.isdigit() else name: size for name, size in placement.max_memory.items()}
    return limits or None


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def writes() -> bool:
    """Whether this process writes what the stage makes: of the ranks of a run, the first."""
    return os.environ.get("RANK", "0") == "0"


def processes(placement: Placement | None) -> int:
    """How many processes a stage with such a verifier is run by."""
    if placement is None or placement.verifier != "tp":
        return 1
    return placement.processes or max(1, torch.cuda.device_count())


def stamp(placement: Placement | None) -> dict[str, str | int]:
    """What a placement adds to the hardware stamp: speeds are compared within one alone."""
    if placement is None:
        return {}
    beside = f", drafter on {placement.drafter}" if placement.drafter else ""
    devices = world() if placement.verifier == "tp" else max(1, torch.cuda.device_count())
    return {"placement": f"{placement.verifier}{beside}", "devices": devices}


def copy_of(embedding: nn.Module) -> nn.Module:
    """A model's input embedding for a drafter on another device, which would else take the model's own with it."""
    if any(weight.is_meta for weight in embedding.parameters()):
        raise ValueError(
            "device.placement: the verifier's embedding is kept off its device; raise max_memory of the first one"
        )
    copied = deepcopy(embedding)
    for name in ("_hf_hook", "_old_forward"):  # accelerate's, which would bring rows back to the original's device
        vars(copied).pop(name, None)
    vars(copied).pop("forward", None)
    return copied


def refuse_ranks(placement: Placement | None, what: str) -> None:
    """ValueError for a tensor-parallel verifier where several processes would get in each other's way."""
    if placement is not None and placement.verifier == "tp":
        raise ValueError(f"device.placement.verifier: tp is for cells, not for {what}; write auto")


def check_ranks(config: Any) -> None:
    """ValueError unless so many ranks can share the heads of such a model."""
    ranks, heads, key_heads = world(), config.num_attention_heads, config.num_key_value_heads
    if ranks < 2:
        raise ValueError(
            "device.placement.verifier: tp takes a process for each device: give `processes` of 2 or more, or start "
            "the stage with torchrun --nproc-per-node <devices>"
        )
    if heads % ranks or key_heads % ranks:
        raise ValueError(
            f"device.placement.verifier: {heads} heads and {key_heads} key heads cannot be shared by {ranks} ranks; "
            "write a number of processes that divides both"
        )
