r"""Tables for a paper: booktabs, shrunk to the text width (needs \usepackage{booktabs,graphicx})."""

from collections.abc import Sequence

import pandas as pd

from stages.report import tables
from stages.report.frames import Frame

PACKAGES = "% \\usepackage{booktabs,graphicx}"
_SPECIAL = str.maketrans(
    {c: f"\\{c}" for c in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "α": r"$\alpha$", "·": r"$\cdot$", "×": r"$\times$", "±": r"$\pm$"}
)


def escape(text: str) -> str:
    """Text that LaTeX sets as it stands, in any font encoding."""
    return text.translate(_SPECIAL)


def table(frame: Frame, *, together: int = 0) -> str:
    """A frame as a tabular. Rows whose first `together` columns are equal stand together, with a gap to others."""
    align = "".join("r" if pd.api.types.is_numeric_dtype(frame[c]) else "l" for c in frame.columns)
    body, before = [], None
    for row in tables.lines(frame):
        if together and before not in (None, row[:together]):
            body.append("\\addlinespace")
        before = row[:together]
        body.append(_line([escape(text) for text in row]))
    return _tabular(align, [_line([escape(str(c)) for c in frame.columns])], body)


def by_method(frame: Frame) -> str:
    """The paper's Table 2: of a table of speed-ups, two columns for each benchmark and split, the fastest in bold."""
    rows = tables.drafting(frame)
    places = list(dict.fromkeys(zip(rows["benchmark"], rows["split"], strict=True)))
    methods = list(dict.fromkeys(rows["method"]))
    found = {(r["benchmark"], r["split"], r["method"]): r for r in rows.to_dict("records")}
    best = {place: max(r["speedup"] for key, r in found.items() if key[:2] == place) for place in places}
    body = []
    for method in methods:
        cells = [escape(method)]
        for place in places:
            row = found.get((*place, method))
            speed = tables.ratio(row["speedup"]) if row else tables.NONE
            bold = row is not None and row["speedup"] == best[place]
            cells += [f"\\textbf{{{speed}}}" if bold else speed]
            cells += [tables.shown("", float(row["accepted_streak"])) if row else tables.NONE]
        body.append(_line(cells))
    names = [f"\\multicolumn{{2}}{{c}}{{{escape(' '.join(place))}}}" for place in places]
    rules = " ".join(f"\\cmidrule(lr){{{2 * i + 2}-{2 * i + 3}}}" for i in range(len(places)))
    heads = [_line(["", *names]), *([rules] if rules else []), _line(["method", *["speed-up", "streak"] * len(places)])]
    return _tabular("l" + "rr" * len(places), heads, body)


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _tabular(align: str, heads: list[str], body: list[str]) -> str:
    return "\n".join(
        [
            PACKAGES,
            "\\resizebox{\\textwidth}{!}{%",
            f"\\begin{{tabular}}{{{align}}}",
            "\\toprule",
            *heads,
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}}",
            "",
        ]
    )
