"""What a computation holds in memory at most: every allocation is counted, also those inside one operator."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


class Held(NamedTuple):
    peak: int  # bytes, above what was there before the step
    kept: int  # bytes still held after it


def extra(find: Callable[[], Tensor], inputs: Sequence[Tensor]) -> int:
    """Bytes that find() and its backward pass hold at once, above the inputs and their gradients."""
    found, device = list[Tensor](), inputs[0].device
    forward = held(lambda: found.append(find()), device=device)
    backward = held(lambda: found.pop().sum().backward(), device=device)
    gradients = sum(x.numel() * x.element_size() for x in inputs if x.requires_grad)
    return max(forward.peak, forward.kept + backward.peak - gradients)


def held(step: Callable[[], Any], *, device: torch.device | str = "cpu") -> Held:
    """Bytes of torch's allocators; what a library's own workspace takes beside them is not seen."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return Held(torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    profiler: Any = trace.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    now, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return Held(peak, now)
