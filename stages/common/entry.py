"""How every stage starts: `python -m stages.<name> <profile> [what] [method]`.

    if __name__ == "__main__":
        entry.run(main, objective=lambda profile: keys_at("objectives"))

Command lines carry identity only, never values. A user's mistake (ValueError) ends as one line on stderr and
status 1, a wrong command line as the list of what is accepted and status 2; `python -X dev` shows the
traceback instead. Of the processes that torchrun starts, the first one speaks.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stages import COLLECT
from stages.common.params import PARAMS, Natural, load, profiles

SILENCE = 5  # seconds


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a verifier too large for one device is laid out, and where its drafter lives (stages/common/spread.py)."""

    verifier: Literal["one", "auto", "tp"]
    drafter: str = ""  # a torch device, such as cuda:1; "": beside the verifier
    max_memory: dict[str, str] = field(default_factory=dict)  # of `auto`: by device ("0", "cpu"), such as 70GiB
    processes: Natural = 0  # of `tp`; 0: one for each GPU


@dataclass(frozen=True, kw_only=True)
class Device:
    """`<profile>.device`: where tensors live, in which type, on how many threads (0: all cores)."""

    name: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "auto"]
    threads: Natural
    placement: Placement | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Identity of one run: the profile and the further words of the command line, by name."""

    profile: str
    words: dict[str, str]

    def __getattr__(self, name: str) -> str:
        words: dict[str, str] = object.__getattribute__(self, "__dict__").get("words", {})
        if name in words:
            return words[name]
        raise AttributeError(name)

    def device(self) -> Device:
        return load(Device, self.profile, "device")


def run(
    main: Callable[[Run], None],
    *,
    compute: bool = True,
    argv: Sequence[str] | None = None,
    **words: Callable[[str], Sequence[str]],
) -> None:
    """Parse the command line and call `main`; `compute=False` leaves torch and the device section alone.

    Each keyword is a further identity word: its name, and a function from profile to the accepted values.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    gc.freeze()  # what is imported stays; the collector need not look at it again, nor at the end
    gc.set_threshold(*COLLECT)
    try:
        parsed = parse(given, words)
        if compute:
            set_threads(parsed.device().threads)
        main(parsed)
    except UsageError as error:
        _stop(str(error), 2)
    except ValueError as error:
        if sys.flags.dev_mode:
            raise
        _stop(f"error: {error}", 1)
    except KeyboardInterrupt:
        _stop("interrupted", 130)
    finally:
        gc.freeze()  # what was imported since; or the interpreter walks through it all as it ends, for seconds


class UsageError(ValueError):
    """A command line that names no run; the message lists what is accepted."""


def parse(argv: Sequence[str], words: dict[str, Callable[[str], Sequence[str]]]) -> Run:
    """The run a command line names; UsageError otherwise."""
    shape = " ".join(["<profile>", *(f"<{name}>" for name in words)])
    usage = f"usage: python -m {_module()} {shape}"
    if len(argv) != 1 + len(words):
        detail = f"expected {1 + len(words)} word(s), got {len(argv)}; profiles: {', '.join(profiles())}"
        raise UsageError(f"{usage}\n{detail}")
    profile = argv[0]
    if profile not in profiles():
        raise UsageError(f"{usage}\nno profile {profile!r} in {PARAMS}; accepted: {', '.join(profiles())}")
    found = dict(zip(words, argv[1:], strict=True))
    for name, accepted in words.items():
        if found[name] not in accepted(profile):
            values = ", ".join(accepted(profile))
            raise UsageError(f"{usage}\nno {name} {found[name]!r} in profile {profile}; accepted: {values}")
    return Run(profile=profile, words=found)


def set_threads(threads: int) -> None:
    """Give torch `threads` threads; 0 means every core this process may use, its part where several share them."""
    import torch

    from stages.common.provenance import cores

    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, cores() // sharing))


def _module() -> str:
    parts = Path(sys.argv[0]).parts
    return f"stages.{parts[-2]}" if parts and parts[-1] == "__main__.py" else "stages.<name>"


def _stop(message: str, status: int) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if rank and status == 130:
        raise SystemExit(status)
    if (
        rank
    ):  # the same mistake stops the first process, and torchrun then ends this one: it has something to add if not
        time.sleep(SILENCE)
        message = f"process {rank}: {message}"
    print(message, file=sys.stderr)
    raise SystemExit(status)
