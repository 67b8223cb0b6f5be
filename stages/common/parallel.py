"""One training in many processes: started by torchrun, joined by torch's own DDP or FSDP2.

    if parallel.launch(run, parallel.processes(params.training.parallel)):
        return
    with parallel.joined(run.device().name):
        ...

What is computed does not hang on how many processes there are. Every process draws the whole micro-batch and computes
its own part of the texts; a loss is a sum over windows divided by their number in the whole micro-batch (`share`), and
gradients are added up over processes. Curves and weights are those of one process up to rounding.

Under DDP every process holds all weights; FSDP2 spreads the layers, their gradients and the optimizer's state over
the processes. On a GPU passes compute in the profile's number format over float32 masters. Process 0 alone writes.

A process knows its place from torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK): whoever has several machines calls
torchrun himself, and `launch` leaves the work to the processes that are there.
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stages.common import entry
from stages.common.params import Count, ParamError

T = TypeVar("T")
PATIENCE = timedelta(hours=12)  # the others wait while process 0 writes; a dead process is noticed by torchrun


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """`parallel` of a training section."""

    processes: Count  # of this machine, one a GPU; who starts torchrun himself says it there
    strategy: Literal["ddp", "fsdp2"]
    checkpoint_activations: bool  # keep a layer's inputs alone, and run it again in the backward pass


# Starting and joining ---------------------------------------------------------------------------------------


def processes(settings: Parallel | None) -> int:
    """How many a training section asks for."""
    return 1 if settings is None else settings.processes


def launch(run: entry.Run, processes: int) -> bool:
    """Start this stage again in so many processes under torchrun; True once they are done, and nothing is left to do.

    False where this process does the work: one is enough, or it is one of several already. SystemExit with the status
    of the first that failed.
    """
    if processes == 1 or "WORLD_SIZE" in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun would set, with a warning
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes say what went wrong
    module = f"stages.{Path(sys.argv[0]).parent.name}"
    words = ["--standalone", f"--nproc-per-node={processes}", "-m", module, run.profile, *run.words.values()]
    try:
        torchrun(parse_args(words))
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise ValueError(f"process {number} of {processes} was ended by {name}; start again to go on") from None
        raise SystemExit(failure.exitcode) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    return True


@contextmanager
def joined(device: str) -> Iterator[None]:
    """This process among those of its run, for as long as it lasts. device: "cpu" or "cuda"."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    _end_with_parent()
    place = local_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    yield
    dist.destroy_process_group()  # not after an error: nobody waits for those who cannot come


def local_device(device: str) -> torch.device:
    """The torch device of this process. ValueError if its machine has none for it."""
    if device != "cuda" or "LOCAL_RANK" not in os.environ:
        return torch.device(device)
    number, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= there:
        raise ValueError(
            f"process {number} of this machine has no GPU of its own: there are {there}; lower `processes` in the "
            "section's `parallel` (or torchrun's --nproc-per-node)"
        )
    return torch.device(device, number)


def _end_with_parent() -> None:
    """Linux: end when torchrun is killed, which could not end its processes then."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


# Who does what ----------------------------------------------------------------------------------------------


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def first() -> bool:
    """Whether this is the process that writes files and shows progress."""
    return rank() == 0


def wait() -> None:
    """Until every process has come this far."""
    if size() > 1:
        dist.barrier()


def part_of(count: int) -> slice:
    """This process's part of `count` things: neighbours, and as many as any other has, or one fewer."""
    return slice(count * rank() // size(), count * (rank() + 1) // size())


def gathered(value: T) -> list[T]:
    """What every process has, in their order; tensors on the CPU only."""
    if size() == 1:
        return [value]
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, value)
    return found


# The drafter of all processes -------------------------------------------------------------------------------


class Team(nn.Module):
    """A drafter as all processes train it: what is computed with it runs inside `forward`, on which torch hooks.

    It changes the drafter in place, so it comes before the optimizers. settings: None for one process as ever.
    dtype: of the passes on a GPU.
    """

    def __init__(self, drafter: Any, settings: Parallel | None, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if settings is None and size() > 1:
            raise ParamError(
                f"params.yaml: {size()} processes were started, but the training section has no `parallel`; write "
                "parallel: {processes: 8, strategy: fsdp2, checkpoint_activations: true} there, or start one"
            )
        self.drafter = drafter
        self.autocast = dtype if settings is not None and drafter.device.type == "cuda" else torch.float32
        self.ddp: DistributedDataParallel | None = None
        if settings is not None and settings.checkpoint_activations:
            checkpoint_activations(drafter)
        if settings is None or size() == 1:
            return
        if settings.strategy == "ddp":
            self.ddp = DistributedDataParallel(_Pass(drafter), broadcast_buffers=False)
        else:
            _shard(self, dtype=self.autocast)
            self.autocast = torch.float32  # FSDP2's own policy does it

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()

    def compute(self, what: Callable[[], T], *, more: bool = False) -> T:
        """What `what` gives, in a forward pass of all processes. more: further ones come before gradients are used."""
        casting = torch.autocast("cuda", self.autocast) if self.autocast != torch.float32 else nullcontext()
        with casting:
            if self.ddp is None or not torch.is_grad_enabled():
                return self(what)
            with self.ddp.no_sync() if more else nullcontext():
                return self.ddp(what)


class _Pass(nn.Module):
    def __init__(self, drafter: nn.Module) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def _shard(team: Team, *, dtype: torch.dtype) -> None:
    """Spread every layer, and then what is left but the embedding: the verifier's head may be tied to that."""
    drafter = team.drafter
    mesh = init_device_mesh(drafter.device.type, (size(),))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    shared = set(drafter.body.embed_tokens.parameters()) - set(drafter.trained())
    for layer in drafter.body.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # Resharded after the pass: what looks at parameters between passes must find the spread ones.
    fully_shard(team, mesh=mesh, mp_policy=policy, ignored_params=shared, reshard_after_forward=True)


def checkpoint_activations(drafter: Any) -> None:
    """Keep the inputs of each decoder layer alone where gradients are asked for; losses and gradients stay the same."""
    for layer in drafter.body.layers:
        layer.forward = partial(_again, layer.forward)


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Within it process 0 has every weight whole, on the CPU where it was spread, to save it: no pass runs here.

    All processes call it.
    """
    spread = list[tuple[nn.Module, str, nn.Parameter]]()
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            if isinstance(p.data, DTensor):
                full = p.data.full_tensor()
                if first():
                    spread.append((owner, name, p))
                    setattr(owner, name, nn.Parameter(full.cpu(), requires_grad=p.requires_grad))
    try:
        yield
    finally:
        for owner, name, p in spread:
            setattr(owner, name, p)
    wait()
