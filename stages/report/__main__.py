"""Report stage: `python -m stages.report <profile>`.

Reads   data/<p>/cells/<benchmark>/<method>.parquet, data/<p>/curves/{adapt,<objective>,<baseline>}.csv
Writes  reports/<p>/: metrics.json speedups.csv speedups.md speedups.tex methods.tex bars.csv curves.csv acceptance.csv
        figures/*.svg report.html report.md
Params  seed, benchmarks, methods, objectives, baselines, report

`python -m stages.report --profile <profile> --compare <profile or revision>` prints two reports side by side.
"""

import sys

from stages.common import entry, store
from stages.common.params import keys_at, load
from stages.report import brief, cells, compare, content, curves, gallery, page, tables, words
from stages.report.params import ReportParams

VANILLA = "vanilla"  # always measured; params.yaml names the others


def main(run: entry.Run, params: ReportParams, *, seed: int) -> content.Report:
    """Read, compute, write. ValueError names a missing file or cells from several machines."""
    objectives = keys_at("objectives")
    trainings = ["adapt", *objectives, *keys_at("baselines")]
    report = content.build(
        run.profile,
        cells.read(run.profile, benchmarks=keys_at("benchmarks"), methods=[VANILLA, *keys_at("methods")]),
        curves.read(run.profile, trainings),
        trainings=trainings,
        objectives=objectives,
        params=params,
        seed=seed,
    )
    write(report)
    return report


def write(report: content.Report) -> None:
    """Every file of the report; a figure that is no longer drawn does not stay behind."""
    folder = store.report_folder(report.profile)
    plates = gallery.plates(report)
    with store.replace_folder(folder / "figures") as figures:
        for plate in plates:
            if plate.svg:
                (figures / f"{plate.name}.svg").write_text(plate.svg, encoding="utf-8")
    store.write_json(folder / "metrics.json", content.metrics(report))
    store.write_text(folder / "speedups.csv", tables.csv(report.table))
    store.write_text(folder / "speedups.md", tables.markdown(report.table))
    store.write_text(folder / "speedups.tex", tables.latex(report.table))
    store.write_text(folder / "methods.tex", tables.latex(tables.by_method(report.table)))
    store.write_text(folder / "bars.csv", tables.csv(tables.bars(report.table)))
    store.write_text(folder / "curves.csv", tables.csv(curves.long_form(report.curves)))
    store.write_text(folder / "acceptance.csv", tables.csv(report.acceptance))
    store.write_text(folder / "report.html", page.render(report, plates))
    store.write_text(folder / "report.md", brief.render(report, plates))


def _run(run: entry.Run) -> None:
    report = main(run, load(ReportParams, "report"), seed=load(int, "seed"))
    for line in filter(None, [words.alarm(report), *words.findings(report)]):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    if "--compare" in sys.argv:
        try:
            compare.main(sys.argv[1:])
        except ValueError as error:
            sys.exit(f"error: {error}")
    else:
        entry.run(_run, compute=False)
