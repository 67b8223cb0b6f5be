"""Published numbers beside ours.

`published.csv` names for each the section or figure of SpecDiff-2 (arXiv 2511.00606), or its project page.
They come from A100s and other models: a direction, not a target.
"""

import re
from functools import cache
from pathlib import Path

import pandas as pd

from stages.report import tables
from stages.report.cells import VANILLA
from stages.report.frames import Column, Frame

FILE = Path(__file__).with_name("published.csv")
MATHS, CODE, OPEN = ("gsm_symbolic", "math500", "gsm8k"), ("humaneval", "livecodebench"), ("mt_bench", "gpqa")
KIN = {  # our benchmark of the same kind
    "math500": MATHS,
    "code": CODE,
    "open_qa": OPEN,
    "math+code": (*MATHS, *CODE),
    "all": (*MATHS, *CODE, *OPEN),
}
SERIES = ["verifier", "benchmark", "method", "metric"]


def beside(table: Frame) -> Frame:
    """Headline numbers of methods that we ran, each with ours on benchmarks of its kind."""
    facts: Frame = _facts()
    plain = facts["metric"].isin(["speedup", "accepted_streak"]) & facts["setting"].eq("")
    facts = facts[plain & facts["method"].isin(set(table["method"]))]
    rows = []
    for fact in facts.to_dict("records"):
        kin = table[table["benchmark"].isin(KIN.get(fact["benchmark"], ()))]
        metric = fact["metric"]
        rows.append(
            {
                "source": fact["source"],
                "verifier": fact["verifier"],
                "benchmark": fact["benchmark"],
                "method": fact["method"],
                "number": metric.replace("speedup", "speed-up").replace("_", " "),
                "published": f"{fact['value']:.2f}" + (f" ({fact['note']})" if fact["note"] else ""),
                "same method here": span(kin.loc[kin["method"] == fact["method"], metric]),
                "best method here": span(_best(kin[kin["method"] != VANILLA], metric)),
            }
        )
    return pd.DataFrame(rows)


def span(values: Column) -> str:
    """'lowest to highest', one number if they look alike, or n/a."""
    values = values.dropna()
    if values.empty:
        return tables.NONE
    low, high = tables.ratio(values.min()), tables.ratio(values.max())
    return low if low == high else f"{low} to {high}"


def sources() -> list[str]:
    """The figures that have numbers, by number."""
    names = {name for name in _facts()["source"] if name.startswith("Figure ")}
    return sorted(names, key=lambda name: int(name.removeprefix("Figure ")))


def figure(name: str) -> Frame:
    """The numbers of a published figure: a row for each curve, a column for each place on its axis.

    A column that says the same in every row is left out (`about` tells it). Empty where nothing was read off.
    """
    facts = _facts()
    facts = facts[facts["source"] == name]
    if facts.empty:
        return pd.DataFrame()
    settings = pd.DataFrame([_split(text) for text in facts["setting"]], index=facts.index)
    series = [column for column in SERIES if facts[column].nunique() > 1]
    if settings.empty:  # one number each: the methods are the axis
        places = facts["method"]
        series = [column for column in series if column != "method"]
    else:
        axis = max(settings.columns, key=lambda key: settings[key].nunique())
        places = settings[axis].map(lambda value: f"{axis} = {value:g}")
        series += [key for key in settings.columns if key != axis]
    long = facts[[c for c in series if c in facts]].join(settings[[c for c in series if c in settings]])
    long = long.assign(place=places, value=facts["value"])
    if not series:
        return pd.DataFrame([dict(zip(long["place"], long["value"], strict=True))])
    wide = long.pivot_table(index=series, columns="place", values="value", sort=False)
    return wide.reset_index().rename_axis(columns=None)


def about(name: str) -> str:
    """What a published figure shows, from its rows: the metric, on what, and how the numbers were read off."""
    facts = _facts()
    facts = facts[facts["source"] == name]
    if facts.empty:
        return f"The paper's {name} has no number in published.csv to stand beside this one."
    parts = []
    for column in ("metric", "method", "benchmark", "verifier"):
        values = [value for value in dict.fromkeys(facts[column]) if value]
        if len(values) == 1:
            parts.append(values[0].replace("speedup", "speed-up").replace("_", " "))
    notes = "; ".join(note for note in dict.fromkeys(facts["note"]) if note)
    return f"The paper's {name}: {', '.join(parts)}" + (f" ({notes})" if notes else "") + "."


def _split(setting: str) -> dict[str, float]:
    """'K=1;T_d=0.1' as numbers by name."""
    return {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", setting)}


@cache
def _facts() -> Frame:
    return pd.read_csv(FILE, dtype={"setting": str, "note": str}, keep_default_na=False)


def _best(table: Frame, metric: str) -> Column:
    return table.groupby(["benchmark", "split"])[metric].max() if len(table) else pd.Series(dtype=float)
