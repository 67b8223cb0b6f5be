"""Two reports side by side: `python -m stages.report --profile cpu --compare <another profile or a Git revision>`.

Reads  reports/<profile>/speedups.csv and the other's, from the working tree or from the revision
Prints what differs in a sentence each, then a Markdown table: speed-up and accepted streak of either, for each
       benchmark, split and method, the ratio of the speed-ups, and whether their intervals are apart
"""

import argparse
import io
import subprocess
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from stages.common import store
from stages.common.params import profiles
from stages.report import tables
from stages.report.cells import VANILLA
from stages.report.findings import count
from stages.report.frames import Frame

KEYS = ["benchmark", "split", "method"]
NUMBERS = ["speedup", "speedup_low", "speedup_high", "accepted_streak", "unexcused_differences"]
OTHER = " of other"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.report", description="Two reports side by side.")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--compare", required=True, metavar="OTHER", help="another profile, or a Git revision")
    args = parser.parse_args(argv)
    print(side_by_side(args.profile, args.compare), end="")


def side_by_side(profile: str, other: str) -> str:
    """Sentences and the table. Raises ValueError where a report is missing or has no rows of benchmarks and methods."""
    here = read(profile)
    there = read(other) if other in profiles() else read(profile, revision=other)
    both = here.merge(there, on=KEYS, how="outer", suffixes=("", OTHER), sort=False, indicator="where")
    order = {key: i for i, key in enumerate(dict.fromkeys([*_keys(here), *_keys(there)]))}
    both = both.assign(order=[order[key] for key in _keys(both)]).sort_values("order")
    rows = [
        {
            **{key: str(row[key]) for key in KEYS},
            f"speed-up {profile}": spread(row, ""),
            f"speed-up {other}": spread(row, OTHER),
            "ratio": tables.ratio(row["speedup"] / row[f"speedup{OTHER}"]),
            "intervals": intervals(row),
            f"streak {profile}": tables.shown("accepted_streak", row["accepted_streak"]),
            f"streak {other}": tables.shown("accepted_streak", row[f"accepted_streak{OTHER}"]),
        }
        for row in both.to_dict("records")
    ]
    said = summary(both, profile, other)
    return "\n\n".join([" ".join(said), tables.markdown(pd.DataFrame(rows))])


def summary(both: Frame, profile: str, other: str) -> list[str]:
    """How many rows both have and which way they moved; what only one of them has; broken losslessness."""
    shared = both[(both["where"] == "both") & (both["method"] != VANILLA)]
    ratios = (shared["speedup"] / shared[f"speedup{OTHER}"]).dropna()
    said = []
    if len(ratios):
        apart = [intervals(row) for row in shared.loc[ratios.index].to_dict("records")].count("apart")
        faster = int((ratios > 1).sum())
        said.append(
            f"{count(len(ratios), 'row')} of drafting methods are in both: {profile} is faster in {faster} of them, "
            f"{tables.ratio(float(np.exp(np.log(ratios).mean())))} times {other} in the geometric mean; in {apart} the "
            "intervals are apart."
        )
    else:
        said.append("No row of a drafting method was timed in both.")
    for side, name in (("left_only", profile), ("right_only", other)):
        alone = both[both["where"] == side]
        if len(alone):
            methods = ", ".join(dict.fromkeys(alone["method"]))
            said.append(f"Only in {name}: {count(len(alone), 'row')} ({methods}).")
    for suffix, name in (("", profile), (OTHER, other)):
        broken = both[f"unexcused_differences{suffix}"].sum()
        if broken > 0:
            said.append(f"{name} is NOT LOSSLESS: {broken:.0f} answers differ without excuse.")
    return said


def read(profile: str, *, revision: str | None = None) -> Frame:
    """A report's speed-ups, from the working tree or as a revision has them. Older reports may lack a number: NaN."""
    path = store.report_folder(profile) / "speedups.csv"
    if revision is None:
        if not path.exists():
            raise ValueError(f"{path}: not found; run dvc repro report@{profile}")
        return _columns(pd.read_csv(path), path.as_posix())
    shown = subprocess.run(
        ["git", "show", f"{revision}:./{path.as_posix()}"], capture_output=True, text=True, check=False
    )
    if shown.returncode:
        reason = (shown.stderr.strip().splitlines() or ["git failed"])[-1]
        raise ValueError(f"{revision!r} is neither a profile ({', '.join(profiles())}) nor a revision: {reason}")
    return _columns(pd.read_csv(io.StringIO(shown.stdout)), f"{path.as_posix()} of {revision}")


def _columns(table: Frame, where: str) -> Frame:
    if missing := [key for key in KEYS if key not in table]:
        raise ValueError(
            f"{where}: no column {', '.join(missing)}; it is not a table of speed-ups that can be compared"
        )
    return table.reindex(columns=[*KEYS, *NUMBERS])


def _keys(table: Frame) -> list[tuple[str, ...]]:
    return list(table[KEYS].itertuples(index=False, name=None))


def spread(row: dict[Hashable, Any], suffix: str) -> str:
    """A speed-up with its interval; n/a where this report has no such row."""
    value, low, high = (row[f"speedup{end}{suffix}"] for end in ("", "_low", "_high"))
    return tables.NONE if pd.isna(value) else f"{tables.ratio(value)} [{tables.ratio(low)}, {tables.ratio(high)}]"


def intervals(row: dict[Hashable, Any]) -> str:
    """Whether the two intervals share a value; n/a where one is not known."""
    a, b = ((row[f"speedup_low{suffix}"], row[f"speedup_high{suffix}"]) for suffix in ("", OTHER))
    if pd.isna([*a, *b]).any():
        return tables.NONE
    return "apart" if a[0] > b[1] or b[0] > a[1] else "overlap"
