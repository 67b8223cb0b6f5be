"""Report stage: `python -m stages.report <profile>`.

Reads   data/<p>/cells/<benchmark>/<method>.parquet, data/<p>/curves/{adapt,<objective>,<baseline>}.csv, and what the
        studies of sweeps read (STUDIES), where there are any
Writes  reports/<p>/: metrics.json speedups.csv speedups.md speedups.tex methods.tex bars.csv curves.csv acceptance.csv
        tables/*.{csv,tex} figures/*.svg report.html report.md
Params  seed, benchmarks, methods, objectives, soft_objectives, baselines, report

`python -m stages.report --profile <profile> --compare <profile or revision>` prints two reports side by side.
"""

import sys

from stages.common import entry, store
from stages.common.params import keys_at, load
from stages.report import (
    brief,
    cells,
    compare,
    content,
    curves,
    gallery,
    latex,
    objectives,
    outline,
    page,
    reasoning,
    seeds,
    sweeps,
    tables,
)
from stages.report.params import ReportParams
from stages.report.study import Study

STUDIES = (sweeps, objectives, reasoning)  # in reading order


def main(run: entry.Run, params: ReportParams, *, seed: int) -> outline.Outline:
    """Read, compute, write. ValueError names a missing file or cells from several machines."""
    asked = [*keys_at("objectives"), *keys_at("soft_objectives")]
    aligned = [name for name in asked if seeds.once(name) == name]  # further seeds are for their study
    trainings = ["adapt", *aligned, *keys_at("baselines")]
    report = content.build(
        run.profile,
        cells.read(run.profile, benchmarks=keys_at("benchmarks"), methods=[cells.VANILLA, *keys_at("methods")]),
        curves.read(run.profile, trainings),
        trainings=trainings,
        objectives=aligned,
        params=params,
        seed=seed,
        studies=studies(run.profile, params, seed=seed),
    )
    laid = outline.build(report, gallery.plates(report))
    write(report, laid)
    return laid


def studies(profile: str, params: ReportParams, *, seed: int) -> list[Study]:
    """What the sweeps of a profile show; empty without a sweep."""
    return [study for module in STUDIES for study in module.studies(profile, params, seed=seed)]


def write(report: content.Report, laid: outline.Outline) -> None:
    """Every file of the report; a figure or table that is no longer made does not stay behind."""
    folder = store.report_folder(report.profile)
    drawn = {f"{plate.name}.svg": plate.svg for plate in laid.plates if plate.svg}
    for name, files in (("figures", drawn), ("tables", _tables(report, laid))):
        with store.replace_folder(folder / name) as inside:
            for file, text in files.items():
                (inside / file).write_text(text, encoding="utf-8")
    store.write_json(folder / "metrics.json", content.metrics(report))
    store.write_text(folder / "speedups.csv", tables.csv(report.table))
    store.write_text(folder / "speedups.md", tables.markdown(report.table))
    store.write_text(folder / "speedups.tex", latex.table(report.table, together=2))
    store.write_text(folder / "methods.tex", latex.by_method(report.table))
    store.write_text(folder / "bars.csv", tables.csv(tables.bars(report.table)))
    store.write_text(folder / "curves.csv", tables.csv(curves.long_form(report.curves)))
    store.write_text(folder / "acceptance.csv", tables.csv(report.acceptance))
    store.write_text(folder / "report.html", page.render(report, laid))
    store.write_text(folder / "report.md", brief.render(report, laid))


def _tables(report: content.Report, laid: outline.Outline) -> dict[str, str]:
    """Files by name: each table's numbers, each as LaTeX, and what the studies add."""
    files = {"histogram.csv": tables.csv(tables.cycles(report.groups))}
    for sheet in laid.sheets:
        files[f"{sheet.name}.csv"] = tables.csv(sheet.rows if sheet.data is None else sheet.data)
        files[f"{sheet.name}.tex"] = latex.table(sheet.rows)
    for name, curve in report.curves.items():  # what `dvc plots` draws, from Git alone
        files[f"loss_{name}.csv"] = tables.csv(curves.losses(curve))
    for study in report.studies:
        files |= study.files
    return files


def _run(run: entry.Run) -> None:
    laid = main(run, load(ReportParams, "report"), seed=load(int, "seed"))
    for line in [*laid.banners, *laid.findings, *laid.trust]:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    if "--compare" in sys.argv:
        try:
            compare.main(sys.argv[1:])
        except ValueError as error:
            sys.exit(f"error: {error}")
    else:
        entry.run(_run, compute=False)
