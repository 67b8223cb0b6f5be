"""Code answers: the program in a text, and a benchmark's tests run on it (HumanEval, arXiv 2107.03374).

    stub = read_stub(turn)
    verdict = run(program_of(stub, text), stub, test, limits)

The turn holds the beginning of a function, the text its rest or the whole of it, in fences or not; what follows the
function is left out. The tests run in a process of their own, the program in another (judge.py, cage.py): neither an
early exit nor a redefined `check` can pass for a test that was run. A harness that runs no test is an error.
"""

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import stages
from stages.common.params import Count, Natural

ROOT = Path(stages.__file__).parents[1]
GRACE_S = 10  # for the judge to end what it judged
_FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)
_CODE = re.compile(r"(?:async\s+def|def|class|import|from)\b|@")
_KEPT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
_UNREADABLE = (SyntaxError, ValueError, MemoryError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`<profile>.score.code`: of one program with all its tests. Wide, or a busy machine fails what is right."""

    cpu_seconds: Count
    wall_seconds: Count
    memory_mb: Count  # of address space
    file_mb: Natural
    open_files: Count
    processes: Natural  # that it may start; 0: it may not fork


class Verdict(NamedTuple):
    """`why` names what failed; `isolation` says how network, files and user were kept apart."""

    passed: bool
    why: str
    isolation: dict[str, str]


class Stub(NamedTuple):
    """The beginning of a function: what stands before its body's first own line."""

    text: str
    entry_point: str
    indent: str


def read_stub(turn: str, *, where: str) -> Stub:
    """The code of a prompt, and the function it asks for: the last one that it begins."""
    blocks = fenced(turn)
    lines = (blocks[0] if blocks else turn).strip("\n").split("\n")
    start = next((i for i, line in enumerate(lines) if _CODE.match(line)), 0)
    text = "\n".join(lines[start:])
    for made in (text, f"{text}\n    pass"):
        with contextlib.suppress(*_UNREADABLE):
            tree = ast.parse(made).body
            if tree and isinstance(tree[-1], ast.FunctionDef):
                return Stub(text, tree[-1].name, " " * tree[-1].body[0].col_offset)
    raise ValueError(f"{where}: the prompt does not end with the beginning of a Python function")


def program_of(stub: Stub, text: str) -> str | None:
    """The stub with its body, or with the whole function behind it; None if there is no code that Python can read."""
    code = code_of(text, stub.entry_point)
    return _with_function(stub, code) or _with_body(stub, code)


def code_of(text: str, entry_point: str) -> str:
    """The fenced block that defines the function, else the first block, else the text up to a closing fence."""
    first = _FENCE.search(text)
    if first and len(_FENCE.findall(text)) % 2:  # a fence that the prompt opened, or one that the limit left open
        before = text[: first.start()]
        if before[:1].isspace() or re.search(rf"^\s*def\s+{entry_point}\b", before, re.MULTILINE):
            return before
    blocks = fenced(text)
    named = [block for block in blocks if re.search(rf"\bdef\s+{entry_point}\b", block)]
    return (named or blocks or [text])[0]


def fenced(text: str) -> list[str]:
    """The contents of ``` blocks, in order; one that is never closed goes to the end."""
    marks = list(_FENCE.finditer(text))
    ends = [mark.start() for mark in marks[1::2]] + [len(text)]
    return [text[mark.end() : end].strip("\n") for mark, end in zip(marks[::2], ends, strict=False)]


def _with_function(stub: Stub, code: str) -> str | None:
    lines = textwrap.dedent(code).split("\n")
    for start in (i for i, line in enumerate(lines) if _CODE.match(line)):
        for end in range(len(lines), start, -1):
            with contextlib.suppress(*_UNREADABLE):
                kept = _definitions(ast.parse("\n".join(lines[start:end])), stub.entry_point)
                if kept is None:
                    break  # it reads, and the function is not in it
                return f"{stub.text}\n{stub.indent}pass\n\n\n{kept}\n"
    return None


def _definitions(tree: ast.Module, entry_point: str) -> str | None:
    """Functions, classes, imports and constants; no calls of the function, no printing."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == entry_point for node in tree.body):
        return None
    kept: list[ast.stmt] = [node for node in tree.body if isinstance(node, _KEPT) and not _uses(node, entry_point)]
    return ast.unparse(ast.Module(kept, []))


def _uses(node: ast.stmt, name: str) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return False
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _with_body(stub: Stub, code: str) -> str | None:
    """The body up to the first line that stands outside it; a first line may have lost its indentation."""
    lines = code.strip("\n").split("\n")
    whole = [stub.indent + line for line in lines]
    inside = 1 if not lines[0][:1].isspace() else 0
    while inside < len(lines) and (not lines[inside].strip() or lines[inside][:1].isspace()):
        inside += 1
    first = [stub.indent + lines[0].lstrip(), *lines[1:inside]]
    found = [_longest(stub, made) for made in (lines[:inside], first, whole)]
    kept, program = max(found, key=lambda pair: pair[0])  # of equals the first
    return program if kept else None


def _longest(stub: Stub, body: list[str]) -> tuple[int, str]:
    """How many lines of a body can be read behind the stub, and the program with them."""
    for end in range(len(body), 0, -1):
        program = "\n".join([stub.text, *body[:end], ""])
        with contextlib.suppress(*_UNREADABLE):
            if _grew(stub, ast.parse(program)):
                return end, program
    return 0, ""


def _grew(stub: Stub, tree: ast.Module) -> bool:
    """Whether the last function of a program is the stub's, with more in it than a docstring."""
    last = tree.body[-1]
    if not (isinstance(last, ast.FunctionDef) and last.name == stub.entry_point):
        return False
    return len(last.body) > (ast.get_docstring(last) is not None)


def run(program: str, stub: Stub, test: str, limits: Limits, *, where: str) -> Verdict:
    """The judge's verdict on a program. ValueError if it gave none, or if the tests never called the function."""
    if os.name != "posix":
        raise ValueError("programs can be run on a POSIX system only; drop the graders that are `code`")
    prompt = f"{stub.text}\n{stub.indent}pass\n"
    task = {"program": program, "prompt": prompt, "entry_point": stub.entry_point, "test": test}
    with tempfile.TemporaryDirectory(prefix="score-", ignore_cleanup_errors=True) as folder:
        answer = _ask_judge(task | {"limits": asdict(limits), "folder": folder}, folder, limits)
    if answer is None:
        return Verdict(False, "time", {})
    if answer["harness"]:
        raise ValueError(f"{where}: no test was run: {answer['harness']}")
    return Verdict(answer["passed"], answer["why"], answer["isolation"])


def _ask_judge(task: dict[str, Any], folder: str, limits: Limits) -> dict[str, Any] | None:
    """The judge's answer; None if it outlived its time."""
    judge = subprocess.Popen(
        [sys.executable, "-s", "-S", "-P", "-B", "-m", "stages.score.judge"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={
            "PATH": os.defpath,
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(ROOT),
        },
        start_new_session=True,
    )
    try:
        said, _ = judge.communicate(json.dumps(task).encode(), timeout=limits.wall_seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        said = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(judge.pid, signal.SIGKILL)
        judge.wait()
    if said is None:
        return None
    try:
        return json.loads(said)
    except ValueError:
        return {"harness": f"the judge ended with status {judge.returncode} and no verdict"}
