"""Two reports side by side: `python -m stages.report --profile cpu --compare <another profile or a Git revision>`.

Reads  reports/<profile>/speedups.csv and the other's, from the working tree or from the revision
Prints a Markdown table: speed-up and accepted streak of either, for each benchmark, split and method
"""

import argparse
import io
import subprocess
from collections.abc import Hashable, Sequence
from typing import Any

import pandas as pd

from stages.common import store
from stages.common.params import profiles
from stages.report import tables
from stages.report.frames import Frame

KEYS = ["benchmark", "split", "method"]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.report", description="Two reports side by side.")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--compare", required=True, metavar="OTHER", help="another profile, or a Git revision")
    args = parser.parse_args(argv)
    print(side_by_side(args.profile, args.compare), end="")


def side_by_side(profile: str, other: str) -> str:
    """The table. Raises ValueError where a report is missing."""
    here = read(profile)
    there = read(other) if other in profiles() else read(profile, revision=other)
    both = here.merge(there, on=KEYS, how="outer", suffixes=("", " of other"), sort=False)
    rows = [
        {
            **{key: str(row[key]) for key in KEYS},
            f"speed-up {profile}": spread(row, ""),
            f"speed-up {other}": spread(row, " of other"),
            f"streak {profile}": tables.shown("accepted_streak", row["accepted_streak"]),
            f"streak {other}": tables.shown("accepted_streak", row["accepted_streak of other"]),
        }
        for row in both.to_dict("records")
    ]
    return tables.markdown(pd.DataFrame(rows))


def read(profile: str, *, revision: str | None = None) -> Frame:
    """A report's speed-ups, from the working tree or as a revision has them."""
    path = store.report_folder(profile) / "speedups.csv"
    if revision is None:
        if not path.exists():
            raise ValueError(f"{path}: not found; run dvc repro report@{profile}")
        return pd.read_csv(path)
    shown = subprocess.run(
        ["git", "show", f"{revision}:./{path.as_posix()}"], capture_output=True, text=True, check=False
    )
    if shown.returncode:
        reason = (shown.stderr.strip().splitlines() or ["git failed"])[-1]
        raise ValueError(f"{revision!r} is neither a profile ({', '.join(profiles())}) nor a revision: {reason}")
    return pd.read_csv(io.StringIO(shown.stdout))


def spread(row: dict[Hashable, Any], suffix: str) -> str:
    """A speed-up with its interval; n/a where this report has no such row."""
    value, low, high = (row[f"speedup{end}{suffix}"] for end in ("", "_low", "_high"))
    return tables.NONE if pd.isna(value) else f"{tables.ratio(value)} [{tables.ratio(low)}, {tables.ratio(high)}]"
