"""Tests that are a list of asserts (MBPP, arXiv 2108.07732), as the stub and the `check` of HumanEval's form."""

import ast
import builtins

from stages.score.programs import Stub


def is_check(reference: str) -> bool:
    """Whether tests are in HumanEval's form already."""
    return "def check(" in reference


def as_check(reference: str, *, where: str) -> tuple[Stub, str]:
    """(stub of the function under test, tests). What stands beside the asserts stays ahead of them.

    The function is the first that the asserts call and nothing beside them brings. ValueError: no asserts, no function.
    """
    try:
        tree = ast.parse(reference)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: the asserts are not Python ({error})") from None
    asserts = [node for node in tree.body if isinstance(node, ast.Assert)]
    setup = [node for node in tree.body if not isinstance(node, ast.Assert)]
    known = set(vars(builtins)) | {name for node in setup for name in _brought(node)}
    called = [name for test in asserts for name in _called(test) if name not in known]
    if not called:
        raise ValueError(f"{where}: no assert that calls a function; the grader `code` wants asserts or a `check`")
    check = ast.parse("def check(candidate): pass").body[0]
    assert isinstance(check, ast.FunctionDef)
    check.body = [*asserts]
    tests = ast.unparse(ast.fix_missing_locations(ast.Module([*setup, check], [])))
    return Stub(f"def {called[0]}(*args, **kwargs):", called[0], "    "), tests


def _called(node: ast.AST) -> list[str]:
    """Names called in a statement, outermost first."""
    return [part.func.id for part in ast.walk(node) if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)]


def _brought(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
