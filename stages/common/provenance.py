"""What produced a number: hardware, library versions, command and memory.

DVC's run-cache does not know machines, so every measured file carries this stamp and the report never divides
across two of them. Git commits and clock times stay out: a rerun of the same inputs must give the same bytes.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch


def stamp(*, device: torch.device | str, dtype: torch.dtype | str) -> dict[str, str | int]:
    """The hardware stamp: device, cores, threads, dtype, torch, transformers, python."""
    return {
        "device": device_name(torch.device(device)),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """Marketing name of the accelerator or processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_rss_mb() -> int:
    """Largest resident memory of this process so far, in MB; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


def command() -> str:
    """The command line of this run as a user would type it, without paths of this machine."""
    program = Path(sys.argv[0])
    words = " ".join(sys.argv[1:])
    if program.name == "__main__.py" and "stages" in program.parts:
        start = len(program.parts) - 1 - program.parts[::-1].index("stages")
        return f"python -m {'.'.join(program.parts[start:-1])} {words}".strip()
    return f"{program.name} {words}".strip()


def prompt_sha256(ids: Sequence[int]) -> str:
    """Digest of rendered prompt ids: another tokenizer or chat template shows."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
