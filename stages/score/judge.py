"""Runs a benchmark's tests on a program that is not trusted. A process of its own: standard library only.

    python -s -S -P -B -m stages.score.judge  < {program, prompt, entry_point, test, limits, folder}
                                              > {passed, why, harness, isolation}

Two processes. The judge runs the tests; the function under test is a proxy that sends the arguments to the candidate
(cage.py), a fork made before the tests were read, and gets plain values back. So the candidate never sees `check`,
cannot touch `assert`, cannot answer with an object that equals everything, and whatever it prints or exits with is no
verdict: only a `check` that returned, after at least one answer, passes. The candidate ends with the judge, and so do
its children.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stages.score import kernel
from stages.score.cage import candidate
from stages.score.messages import decode, encode, receive, send


class TimeUp(BaseException):
    """The wall clock of the whole verdict."""


class Failed(Exception):
    """The candidate raised, died, or answered with what cannot be read."""


class NoTest(Exception):
    """The harness, not the candidate, is at fault."""


def judge(task: dict[str, Any], channel: socket.socket) -> dict[str, Any]:
    """Run the tests on the candidate behind the channel."""
    verdict: dict[str, Any] = {"passed": False, "why": "", "harness": "", "isolation": {}}
    asked_once, answered, gone = False, False, False

    def answer() -> Any:
        nonlocal gone
        try:
            return receive(channel)
        except (EOFError, OSError, ValueError, RecursionError):
            gone = True
            raise Failed("the program ended or sent what is no answer") from None

    def proxy(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked_once, answered, gone
        asked_once = True
        asked = [[encode(arg) for arg in args], {key: encode(arg) for key, arg in kwargs.items()}]
        if "opaque" in json.dumps(asked):
            _refuse_opaque(asked)
        try:
            send(channel, asked)
        except OSError:
            gone = True
            raise Failed("the program ended") from None
        reply = answer()
        if "error" in reply:
            raise Failed(reply["error"])
        answered = True
        try:
            return decode(reply["value"])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            gone = True
            raise Failed("no answer that can be read") from None

    try:
        send(channel, {name: task[name] for name in ("program", "entry_point", "limits", "folder")})
        try:
            verdict["isolation"] = answer()["isolation"]
        except Failed:
            raise NoTest("the process of the program could not be closed in") from None
        if "error" in (loaded := answer()):
            raise Failed(loaded["error"])
        check = load_check(task, proxy)
        check(proxy)
        if gone:
            raise Failed("the program ended")
        if not asked_once:
            raise NoTest("`check` returned without one call of the function")
        if not answered:
            raise Failed("the program answered no call")
        verdict["passed"] = True
    except TimeUp:
        verdict["why"] = "time"
    except NoTest as error:
        verdict["harness"] = str(error)
    except Exception as error:
        verdict["why"] = f"{type(error).__name__} {error}"[:200].strip()
    return verdict


def load_check(task: dict[str, Any], proxy: Callable[..., Any]) -> Callable[..., Any]:
    """The benchmark's `check`, beside the prompt's own helpers; the name of the function means the candidate's."""
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(task["prompt"], "prompt.py", "exec"), space)
        space[task["entry_point"]] = proxy
        exec(compile(task["test"], "test.py", "exec"), space)
    except Exception as error:
        raise NoTest(f"the tests cannot be loaded: {type(error).__name__} {error}") from None
    if not callable(space.get("check")):
        raise NoTest("the tests define no `check`")
    return space["check"]


def _refuse_opaque(asked: Any) -> None:
    if isinstance(asked, dict):
        if "opaque" in asked and isinstance(asked["opaque"], str):
            raise NoTest(f"the tests pass a value of type {asked['opaque']}, which cannot be sent")
        asked = list(asked.values())
    if isinstance(asked, list):
        for part in asked:
            _refuse_opaque(part)


def end_all(child: int) -> None:
    """Kill the candidate's group, then whatever was left to this process, until it has no child."""
    until = time.monotonic() + 5
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    while time.monotonic() < until:
        for orphan in (child, *children()):
            with suppress(OSError):
                os.kill(orphan, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def children() -> list[int]:
    """Processes whose parent this is, where the system tells."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def main() -> None:
    kernel.prctl(kernel.SUBREAPER, 1)  # the orphans of its children become its own
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            mine.close()
            candidate(its)
        os._exit(1)
    its.close()
    kernel.prctl(kernel.DUMPABLE, 0)  # the candidate may not look into this process
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    task = json.load(sys.stdin)
    sys.set_int_max_str_digits(0)

    def time_up(*_: Any) -> None:
        raise TimeUp

    try:
        signal.signal(signal.SIGALRM, time_up)
        signal.setitimer(signal.ITIMER_REAL, task["limits"]["wall_seconds"])
        try:
            verdict = judge(task, mine)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        end_all(child)
    os.write(out, json.dumps(verdict).encode())


if __name__ == "__main__":
    main()
