"""Published numbers beside ours.

`published.csv` names for each the section or figure of SpecDiff-2 (arXiv 2511.00606), or its project page.
They come from A100s and other models: a direction, not a target.
"""

from pathlib import Path

import pandas as pd

from stages.report import tables
from stages.report.cells import VANILLA
from stages.report.frames import Column, Frame

FILE = Path(__file__).with_name("published.csv")
MATHS, CODE, OPEN = "gsm_symbolic", "humaneval", "mt_bench"
KIN = {  # our benchmark of the same kind
    "math500": (MATHS,),
    "code": (CODE,),
    "open_qa": (OPEN,),
    "math+code": (MATHS, CODE),
    "all": (MATHS, CODE, OPEN),
}


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


def _facts() -> Frame:
    return pd.read_csv(FILE, dtype={"setting": str, "note": str}, keep_default_na=False)


def _best(table: Frame, metric: str) -> Column:
    return table.groupby(["benchmark", "split"])[metric].max() if len(table) else pd.Series(dtype=float)
