"""The process of a program that is not trusted: what it may use, and how it answers. Standard library only.

It gets limits on CPU, memory, processes, files and their size, and a folder of its own. Where the system lets it
(kernel.py), it is another user, in an empty network, and changes no file outside; everywhere the interpreter refuses
sockets, signals, other programs and writing elsewhere. That holds off the mistakes and tricks of generated code; it is
no jail for an attacker.
"""

import importlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from stages.score import kernel
from stages.score.messages import decode, encode, receive, send

NOBODY = 65534
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORKS = {"os.fork", "os.forkpty"}
REFUSED = {
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "resource.setrlimit"),
    *("resource.prlimit", "os.kill", "os.killpg", "signal.pthread_kill", "shutil.rmtree", "shutil.move"),
}
UNHEARD = {  # what raises no event
    **dict.fromkeys(("os", "posix"), ("mkfifo", "mknod")),
    **dict.fromkeys(("signal", "_signal"), ("pidfd_send_signal",)),
}
CHANGES = {  # events that change files: how many paths they begin with, and where folders as numbers may stand
    **dict.fromkeys(("os.remove", "os.rmdir"), (1, (1,))),
    "os.mkdir": (1, (2,)),
    "os.chmod": (1, (2,)),
    "os.chown": (1, (3,)),
    "os.utime": (1, (3,)),
    **dict.fromkeys(("os.truncate", "os.setxattr", "os.removexattr"), (1, ())),
    **dict.fromkeys(("os.rename", "os.link"), (2, (2, 3))),
    "os.symlink": (2, (2,)),
}


def candidate(channel: socket.socket) -> None:
    """Close the cage, load the program, answer calls until killed."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, 256)
    task = receive(channel)
    send(channel, {"isolation": confine(task["limits"], task["folder"])})
    space: dict[str, Any] = {"__name__": "candidate"}
    try:
        exec(compile(task["program"], "candidate.py", "exec"), space)
        function = space[task["entry_point"]]
    except BaseException as error:
        send(channel, {"error": type(error).__name__})
        return
    send(channel, {"ready": True})
    while True:
        args, kwargs = receive(channel)
        try:
            reply = {"value": encode(function(*map(decode, args), **{k: decode(v) for k, v in kwargs.items()}))}
        except BaseException as error:
            reply = {"error": type(error).__name__}
        send(channel, reply)


def confine(limits: dict[str, int], folder: str) -> dict[str, str]:
    """Give up what a candidate does not need; how far that went."""
    os.chdir(folder)
    network = kernel.leave_network()
    other = kernel.become(NOBODY, folder, reading=(os.__file__, sys.executable))
    kernel.prctl(kernel.DEATH_SIGNAL, signal.SIGKILL)  # after the change of user, which would take it back
    files = kernel.lock_files(folder)
    limited = os.geteuid() != 0  # nothing limits root's processes
    unset = [name for name, value in _limits(limits).items() if not _limit(name, value)]
    sys.set_int_max_str_digits(0)
    os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [place for place in sys.path if not os.path.isdir(os.path.join(place, "stages"))]
    for module, names in UNHEARD.items():
        for name in names:
            vars(importlib.import_module(module)).pop(name, None)
    sys.addaudithook(refusals(folder, forks=limited and limits["processes"] > 0))
    alone = "refused by the interpreter alone"
    return {
        "network": "an empty one" if network else "TCP refused by the kernel" if files >= 4 else alone,
        "files": "locked by the kernel" if files >= 3 else "another user's" if other else alone,
        "processes": "another user's" if other else "limited" if limited else alone,
        "limits": f"without {', '.join(unset)}" if unset else "all",
    }


def _limits(limits: dict[str, int]) -> dict[str, int]:
    """What setrlimit(2) calls them, in seconds, bytes and counts."""
    return {
        "CPU": limits["cpu_seconds"],
        "AS": limits["memory_mb"] << 20,
        "FSIZE": limits["file_mb"] << 20,
        "NOFILE": limits["open_files"],
        "NPROC": limits["processes"] + 1,
        "CORE": 0,
    }


def _limit(name: str, value: int) -> bool:
    """Whether the limit holds now: as asked for, or a lower one that was there already."""
    number = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(number)[1]
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(number, (least, least))
    except (OSError, ValueError):
        return False
    return True


def refusals(folder: str, *, forks: bool) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook: no network, no signals, no other programs, no ctypes, no writing outside the folder."""
    inside = os.path.realpath(folder) + os.sep

    def outside(path: Any) -> bool:
        if isinstance(path, int):
            return True
        place = os.fsdecode(os.path.realpath(path))
        return place != os.devnull and not (place + os.sep).startswith(inside)

    def opens_outside(path: Any, mode: Any, flags: Any) -> bool:
        if isinstance(path, int) or not (isinstance(flags, int) and flags & WRITING):
            return False
        return outside(path) or (mode is None and not os.path.isabs(path))  # os.open may mean another folder than this

    def changes_outside(event: str, args: tuple[Any, ...]) -> bool:
        paths, folders = CHANGES[event]
        return any(outside(path) for path in args[:paths]) or any(args[place] != -1 for place in folders)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            bad = opens_outside(*args)
        elif event in CHANGES:
            bad = changes_outside(event, args)
        else:
            bad = event in REFUSED or event.startswith(("socket.", "ctypes.")) or (event in FORKS and not forks)
        if bad:
            raise PermissionError(f"{event}: not while code is scored")

    return hook
