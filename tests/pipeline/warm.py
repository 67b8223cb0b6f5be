"""What `python` is in the smoke run: its stages are forks of one process that has imported torch and transformers.

    with started(folder, env) as programs: ...     # programs/python -m <module> <words>

Where PYTHON_EXEC names that program, so are the processes that torchrun starts.

Importing them takes longer than any stage of `smoke` computes, and a run has dozens of stages. A fork has the caller's
folder, environment and streams, and runs what `python -m` runs; nothing of the project is imported ahead of it.
"""

import atexit
import json
import os
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HEAVY = (
    "torch",
    "torch.optim",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "pyarrow.parquet",
    "safetensors.torch",
    "ruamel.yaml",
    "pandas",
    "matplotlib.figure",
    "peft",
    "tqdm",
)
STREAMS = (0, 1, 2)


@contextmanager
def started(folder: Path, env: Mapping[str, str]) -> Iterator[Path]:
    """A folder with a program `python`; it works until the context ends."""
    address = folder / "socket"
    command = shlex.join([sys.executable, "-IS", __file__, str(address)])
    (folder / "python").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (folder / "python").chmod(0o755)
    with subprocess.Popen([sys.executable, __file__, "serve", str(address)], env=env, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the process that stages are forked from did not start"
        try:
            yield folder
        finally:
            server.terminate()


def serve(address: str) -> None:
    """Import what is heavy, then fork for every caller."""
    import gc
    import importlib

    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # a fork that collects them copies every page they stand on
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while True:
            caller, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                attend(caller)
            caller.close()


def attend(caller: socket.socket) -> None:
    """In a fork: run the caller's module in a fork of its own, answer with its exit status, and end."""
    message, streams, _, _ = socket.recv_fds(caller, 2**20, len(STREAMS))
    process = os.fork()
    if process == 0:
        for mine, theirs in zip(STREAMS, streams, strict=True):
            os.dup2(theirs, mine)
        try:
            become(**json.loads(message))
        except SystemExit as end:
            leave(end.code)
        leave(0)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    caller.sendall(json.dumps(status).encode())
    os._exit(0)


def become(words: list[str], folder: str, env: dict[str, str]) -> None:
    """`python <words>` from here on."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    flag, module, *rest = words[1:] if words[0] == "-u" else words  # torchrun's: unbuffered
    assert flag == "-m", words
    sys.orig_argv[:] = ["python", *words]
    sys.argv[:] = [module, *rest]
    sys.path[0] = folder
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def leave(code: Any) -> None:
    """End as the main program of a process does, atexit and all, but for taking the interpreter to pieces."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def ask(address: str, words: list[str]) -> Any:
    """The exit status of a fork that ran these words here."""
    request = json.dumps({"words": words, "folder": os.getcwd(), "env": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [request], STREAMS)
        answer = server.recv(64)
    return json.loads(answer) if answer else "the process that stages are forked from is gone"


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
