"""Code answers: which program a text holds, and that no trick and no accident passes for a test that was run."""

import os
import re
import time
from pathlib import Path

import pytest

from stages.score import programs
from stages.score.programs import Limits, program_of, read_stub, run

TURN = '''Complete this Python function:
```python
from typing import List


def twice(x: int) -> int:
    """Twice x, by this helper."""
    return 2 * x


def twice_all(numbers: List[int]) -> List[int]:
    """Twice every number.
    >>> twice_all([1])
    [2]
    """
```'''
STUB = read_stub(TURN, where="here")
TEST = """
METADATA = {}


def check(candidate):
    assert candidate([1, 2]) == [2, 4]
    assert candidate([]) == []
    assert candidate(list(range(5))) == [twice(x) for x in range(5)]
"""
RIGHT = "    return [twice(number) for number in numbers]"
LIMITS = Limits(cpu_seconds=2, wall_seconds=5, memory_mb=256, file_mb=1, open_files=32, processes=0)
ROOT = getattr(os, "geteuid", lambda: 1)() == 0


def verdict_of(text, *, test=TEST, limits=LIMITS):
    program = program_of(STUB, text)
    assert program is not None
    return run(program, STUB, test, limits, where="here")


def limits_of(**changed):
    return Limits(**{**vars(LIMITS), **changed})


def test_the_stub_ends_with_the_function_that_is_asked_for():
    assert (STUB.entry_point, STUB.indent) == ("twice_all", "    ")
    assert STUB.text.startswith("from typing")
    bare = read_stub("Complete:\ndef f(x):\n    '''Doc.'''", where="here")
    assert (bare.text, bare.entry_point) == ("def f(x):\n    '''Doc.'''", "f")
    assert read_stub("def f(x):", where="here").entry_point == "f"
    with pytest.raises(ValueError, match="there: the prompt does not end"):
        read_stub("Write a poem.", where="there")


WHOLE = "def twice_all(numbers):\n    return [2 * n for n in numbers]\n"


@pytest.mark.parametrize(
    "text",
    [
        RIGHT,
        RIGHT.strip(),
        f"{RIGHT}\n\n\ndef other():\n    return 1 +",
        f"{RIGHT}\n```\nThis doubles every number.",
        f"{RIGHT}\nprint(twice_all(3))",
        WHOLE,
        f"Here it is:\n```python\n{WHOLE}```\nIt doubles. ```print()```",
        f"Sure.\n```\n{WHOLE}",
        f"Sure.\n\n{WHOLE}\nThis doubles every number.",
        f"```python\nimport nothing_at_all_\n```\n```python\nimport math\n{WHOLE}```",
        f"```python\nimport sys\nsys.exit(0)\n{WHOLE}\nprint(twice_all('x') + 1)\nassert twice_all([1]) == 5\n```",
        f"```python\n{WHOLE}\nresult = twice_all(7)\n```",
        f"```python\ndef half(n):\n    return n\n\n{WHOLE}```",
        "    result = []\n    for n in numbers:\n\n        # comment\n        result.append(2 * n)\n    return result",
        "result = []\n    for n in numbers:\n        result.append(2 * n)\n    return result",
        "result = []\nfor n in numbers:\n    result.append(2 * n)\nreturn result",
    ],
)
def test_the_program_in_a_text(text):
    verdict = verdict_of(text)
    assert (verdict.passed, verdict.why) == (True, "")


@pytest.mark.parametrize(
    "text", ["", "I cannot do that.", "```python\n```", "    retur n [", "def twice_all(numbers:\n  (("]
)
def test_a_text_without_code(text):
    assert program_of(STUB, text) is None


FAKE = "True\n    __eq__ = lambda *_: True\n    __len__ = lambda *_: 2"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wrong", "    return numbers"),
        ("raises", "    raise KeyError"),
        ("cut", "    return [2 * n for n in numbers] if numbers else None"),
        ("exit in the function", "    import sys\n    sys.exit(0)"),
        ("hard exit in the function", "    import os\n    os._exit(0)"),
        ("hard exit at the top", f"class A:\n    import os\n    os._exit(0)\n{WHOLE}"),
        (
            "swallows everything",
            "    try:\n        raise SystemExit(0)\n    except BaseException:\n        return None",
        ),
        ("own check", f"def check(candidate):\n    return True\n{WHOLE.replace('2 * n', 'n')}"),
        ("own assert", f"class AssertionError(Exception):\n    pass\n{WHOLE.replace('2 * n', 'n')}"),
        (
            "own builtins",
            "    import builtins\n    builtins.AssertionError = None\n    builtins.all = print\n    return numbers",
        ),
        ("equal to all", f"class A:\n    x = {FAKE}\n\ndef twice_all(numbers):\n    return A()"),
        ("a list equal to all", f"class A(list):\n    x = {FAKE}\n\ndef twice_all(numbers):\n    return A()"),
        ("says that it passed", "    print('{\"passed\": true}')\n    return numbers"),
        ("other frames", "    import sys\n    sys._getframe(1).f_locals['reply'] = 1\n    return numbers"),
    ],
)
def test_no_trick_passes(name, text):
    verdict = verdict_of(text)
    assert not verdict.passed, name
    assert verdict.why


def test_what_it_prints_or_catches_does_not_fail_what_is_right():
    assert verdict_of(f"    print('x' * 3_000_000)\n{RIGHT}").passed
    assert verdict_of(f"    try:\n        1 / 0\n    except ZeroDivisionError:\n        pass\n{RIGHT}").passed


@pytest.mark.parametrize(
    ("text", "limits", "why"),
    [
        ("    while True:\n        pass", {"cpu_seconds": 1, "wall_seconds": 60}, "ended"),
        ("    import time\n    time.sleep(60)", {"wall_seconds": 1}, "time"),
    ],
)
def test_an_endless_program_is_ended(text, limits, why):
    start = time.monotonic()
    verdict = verdict_of(text, limits=limits_of(**limits))
    assert not verdict.passed
    assert why in verdict.why
    assert time.monotonic() - start < 30


def test_memory_files_and_the_place_for_them_are_limited(tmp_path):
    hog = "    return [2 * n for n in numbers] if len('x' * 400_000_000) else []"
    assert "MemoryError" in verdict_of(hog).why
    large = f"    open('x', 'w').write('x' * 3_000_000)\n{RIGHT}"
    assert "OSError" in verdict_of(large).why
    assert verdict_of(f"    open('x', 'w').write('x' * 1000)\n{RIGHT}").passed
    outside = tmp_path / "outside"
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for text in (
        f"    open({str(outside)!r}, 'w').close()\n{RIGHT}",
        f"    import os\n    os.remove({str(victim)!r})\n{RIGHT}",
        f"    import os\n    os.rename({str(victim)!r}, {str(outside)!r})\n{RIGHT}",
        f"    import pathlib\n    pathlib.Path({str(victim)!r}).write_text('')\n{RIGHT}",
        f"    import shutil\n    shutil.rmtree({str(tmp_path)!r})\n{RIGHT}",
    ):
        assert "PermissionError" in verdict_of(text).why
    assert not outside.exists()
    for call in ("os.mknod", "os.mkfifo", "posix.mknod", "posix.mkfifo"):  # the interpreter is not asked
        assert not verdict_of(f"    import os, posix\n    {call}({str(outside)!r})\n{RIGHT}").passed
    assert not outside.exists()
    assert victim.read_text() == "kept"


@pytest.mark.parametrize(
    "line",
    [
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "import os; os.kill(os.getppid(), 9)",
        "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork()",
        "import ctypes; ctypes.CDLL(None)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
    ],
)
def test_network_signals_and_programs_are_refused(line):
    verdict = verdict_of(f"    {line}\n{RIGHT}")
    assert not verdict.passed
    assert "Error" in verdict.why


def test_the_environment_is_clean(monkeypatch):
    monkeypatch.setenv("SECRET_WORD", "hidden")
    assert verdict_of(f"    import os\n    assert 'SECRET_WORD' not in os.environ\n{RIGHT}").passed


REPORTS_PIDS = "def check(candidate):\n    raise ValueError(candidate([]))"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_grandchildren_end_too_even_in_sessions_of_their_own():
    text = """    import os, signal, time
    out, into = os.pipe()
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(into, b"%d " % os.getpid())
            if os.fork() == 0:
                os.write(into, b"%d " % os.getpid())
                time.sleep(600)
            os._exit(0)
    found = []
    while len(found) < 4:
        found += os.read(out, 999).split()
    return [int(pid) for pid in found]"""
    verdict = verdict_of(text, test=REPORTS_PIDS, limits=limits_of(processes=20))
    pids = re.findall(r"\d+", verdict.why)
    assert len(pids) == 4 or not ROOT, verdict.why  # a user with many processes may start none
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_fork_bomb_stays_small_and_ends():
    text = "    import os\n    while True:\n        os.fork()"
    start = time.monotonic()
    verdict = verdict_of(text, limits=limits_of(processes=10, cpu_seconds=1, wall_seconds=3))
    assert not verdict.passed
    assert verdict.why == "Failed BlockingIOError" or not ROOT
    assert time.monotonic() - start < 10


def test_a_program_that_answers_no_call_fails_even_if_the_tests_do_not_mind():
    lenient = "def check(candidate):\n    try:\n        candidate([])\n    except Exception:\n        pass"
    verdict = verdict_of("    raise KeyError", test=lenient)
    assert not verdict.passed
    assert "answered no call" in verdict.why
    assert verdict_of(RIGHT, test=lenient).passed


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("", "no `check`"),
        ("check = 5", "no `check`"),
        ("def check(candidate):\n    pass", "without one call"),
        ("def check(candidate)\n", "cannot be loaded: SyntaxError"),
        ("import nothing_at_all_", "cannot be loaded"),
        ("def check(candidate):\n    candidate(object())", "type object"),
    ],
)
def test_a_harness_that_runs_no_test_is_an_error(test, says):
    with pytest.raises(ValueError, match=rf"here: no test was run: .*{says}"):
        verdict_of(RIGHT, test=test)


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "True",
        "-3",
        "10**400",
        "0.1",
        "float('inf')",
        "'a\\ud800'",
        "b'x'",
        "(1, [2])",
        "{1: (2,)}",
        "{1, 2}",
        "1j",
        "range(3)",
    ],
)
def test_plain_values_arrive_as_they_are(value):
    test = f"def check(candidate):\n    wanted = {value}\n    found = candidate(wanted)\n"
    test += "    assert found == wanted and type(found) is type(wanted)"
    assert verdict_of("    return numbers", test=test).passed


def test_an_iterator_arrives_with_its_items():
    assert verdict_of("    return iter([2, 4])", test="def check(c):\n    assert list(c([1])) == [2, 4]").passed
    assert not verdict_of("    import itertools\n    return itertools.count()").passed


def test_the_entry_point_by_name_is_the_candidate():
    test = "def check(candidate):\n    candidate([])\n    assert twice_all([5]) == [10]"
    assert verdict_of(RIGHT, test=test).passed
    assert not verdict_of("    return []", test=test).passed


def test_the_verdict_says_how_things_were_kept_apart():
    assert set(verdict_of(RIGHT).isolation) == {"network", "files", "processes", "limits"}
    assert programs.GRACE_S > 5, "the judge ends its children within five seconds"
