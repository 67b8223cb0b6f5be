"""A method's section and the shared one with what a point changes, checked as if it stood there."""

import typing
from dataclasses import fields, replace
from typing import Any

from stages.common.params import ParamError, checked, load
from stages.common.sweeps import Spelled, Sweep
from stages.evaluate.harness import Shared
from stages.evaluate.parts import method_module


def method_params(profile: str, sweep: Sweep, point: Spelled, key: str) -> Any:
    """The method's Params at this point. ParamError names the sweep's line."""
    try:
        module = method_module(point.method)
    except ValueError as error:
        what = str(error).partition("methods: ")[2]
        raise ParamError(f"params.yaml: {key}.{sweep.where('method', point.method)}: {what}") from None
    params = load(module.Params, profile, "evaluate", point.method)
    own = {name: value for name, value in point.settings.items() if not name.startswith("shared.")}
    return _changed(params, own, {name: f"{key}.{sweep.where(name, point.method)}" for name in own}, point.method)


def shared_params(shared: Shared, sweep: Sweep, point: Spelled, key: str) -> Shared:
    """evaluate.shared at this point."""
    own = {name: value for name, value in point.settings.items() if name.startswith("shared.")}
    lines = {name.partition(".")[2]: f"{key}.{sweep.where(name, point.method)}" for name in own}
    return _changed(shared, {name.partition(".")[2]: value for name, value in own.items()}, lines, "evaluate.shared")


def _changed(params: Any, values: dict[str, Any], lines: dict[str, str], owner: str) -> Any:
    """params with other values, each of the type and in the range that its field asks for."""
    hints = typing.get_type_hints(type(params), include_extras=True)
    known = [field.name for field in fields(params)]
    for name, line in lines.items():
        if name not in known:
            raise ParamError(f"params.yaml: {line}: not a setting of {owner}, which has {', '.join(known)}")
    found = {name: checked(hints[name], value, lines[name]) for name, value in values.items()}
    try:
        return replace(params, **found)
    except ValueError as error:  # a check across fields in __post_init__
        raise ParamError(f"params.yaml: {', '.join(lines.values())}: {error}") from None
