"""What stands in a report, in its order: the page and report.md set the same sections in type.

A block is a paragraph (str), a list (list of str), a table (Sheet), a figure (Plate), or the whole speed-up table.
"""

from dataclasses import dataclass
from typing import TypeAlias

from stages.report import contrast, fairness, findings, lossless, published, tables, words
from stages.report.content import Report
from stages.report.frames import Frame
from stages.report.study import Plate, Sheet


class SpeedUps:
    """The whole speed-up table, which page and report.md each have a form of their own for."""


Block: TypeAlias = str | list[str] | Sheet | Plate | SpeedUps


@dataclass(frozen=True, kw_only=True)
class Section:
    """`name` is its id; `brief` says whether report.md has it, too."""

    name: str
    title: str
    blocks: list[Block]
    brief: bool = True


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is said first, what speaks for it, and the sections, with all their tables and figures."""

    banners: list[str]  # what must be read before any number
    findings: list[str]
    trust: list[str]
    sections: list[Section]

    @property
    def sheets(self) -> list[Sheet]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Sheet)]

    @property
    def plates(self) -> list[Plate]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Plate)]


def build(report: Report, plates: list[Plate]) -> Outline:
    """Every section that has something to say.

    ValueError if two sections, tables or figures have one name: they would share an id and a file."""
    found = Outline(
        banners=[text for text in (words.SMOKE if report.smoke else "", words.alarm(report)) if text],
        findings=findings.paragraph(report),
        trust=findings.trust(report),
        sections=_sections(report, plates),
    )
    kinds = {"section": found.sections, "table": found.sheets, "figure": found.plates}
    for kind, things in kinds.items():
        names = [thing.name for thing in things]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"report of {report.profile}: two {kind}s are called {name!r}; rename one")
    return found


def _sections(report: Report, plates: list[Plate]) -> list[Section]:
    found = [
        Section(name="speedups", title="Speed-ups", blocks=_speedups(report)),
        Section(name="lead", title="The lead over the others", blocks=_lead(report)),
        Section(name="gains", title="What alignment and trees gain", blocks=_gains(report)),
        *(
            Section(name=study.name, title=study.title, blocks=[study.lead, *study.plates, *study.sheets])
            for study in report.studies
        ),
        Section(name="figures", title="Figures", blocks=[*plates]),
        Section(name="lossless", title="Is it lossless?", blocks=_lossless(report)),
        Section(name="costs", title="Cost model", blocks=_costs(report), brief=False),
        Section(name="accuracy", title="Answers that are right", blocks=_accuracy(report)),
        Section(name="published", title="Beside the published numbers", blocks=_published(report, plates)),
        Section(name="fairness", title="Is the comparison fair?", blocks=_fairness(report)),
        Section(name="machine", title="Methods, machine, versions", blocks=_machine(report)),
        Section(name="limits", title="What the numbers do not show", blocks=[words.limits(report)]),
    ]
    return [section for section in found if section.blocks]


def _speedups(report: Report) -> list[Block]:
    table = tables.by_method(report.table)
    if table.empty:
        return ["No method besides vanilla was timed.", SpeedUps()]
    best = tuple(str(column) for column in table.columns[1:])
    sheet = Sheet(name="by_method", title="", note=words.BY_METHOD, rows=table, best=best)
    splits = words.shared_templates(report)
    return [sheet, *([splits] if splits else []), SpeedUps()]


def _lead(report: Report) -> list[Block]:
    table = report.contrasts
    if table.empty:
        return []
    wide = contrast.wide(table, ["against"]).rename(columns={"against": f"{table['method'].iloc[0]} against"})
    return [Sheet(name="contrasts", title="", note=words.CONTRASTS, rows=wide, data=table)]


def _gains(report: Report) -> list[Block]:
    blocks: list[Block] = []
    table = tables.ablation(report.table)
    if len(table):
        best = tuple(str(column) for column in table.columns[2:])
        blocks.append(Sheet(name="ablation", title="", note=words.ABLATION, rows=table, best=best))
    if len(report.gains):
        wide = contrast.wide(report.gains, ["what", "method", "against"])
        blocks.append(Sheet(name="gains", title="", note=words.GAINS, rows=wide, data=report.gains))
    return blocks


def _lossless(report: Report) -> list[Block]:
    if report.lossless.empty:
        return ["No method besides vanilla was decoded."]
    return [Sheet(name="lossless", title="", note=lossless.NOTE, rows=report.lossless)]


def _costs(report: Report) -> list[Block]:
    if report.costs.empty:
        return ["No method besides vanilla has a timed cycle."]
    return [Sheet(name="costs", title="", note=words.COSTS, rows=cost_lines(report), data=report.costs)]


def cost_lines(report: Report) -> Frame:
    """The cost table with the difference in words."""
    table = report.costs[
        ["benchmark", "split", "method", "t_verify/t_1", "c", "o", "accepted_streak", "predicted", "measured"]
    ].rename(columns={"accepted_streak": "E[L]"})
    flags = [
        f"{e:+.1%}" + (" FAR" if f else "") for e, f in zip(report.costs["error"], report.costs["flagged"], strict=True)
    ]
    return table.assign(difference=flags)


def _accuracy(report: Report) -> list[Block]:
    if report.accuracy.empty:
        return []
    wide = report.accuracy.pivot_table(
        index=["benchmark", "split", "graded"], columns="method", values="accuracy", sort=False
    )
    wide = wide.reset_index().rename_axis(columns=None)
    return [Sheet(name="accuracy", title="", note=words.ACCURACY, rows=wide, data=report.accuracy)]


def _published(report: Report, plates: list[Plate]) -> list[Block]:
    blocks: list[Block] = [words.PUBLISHED]
    if len(report.published):
        blocks.append(Sheet(name="published", title="", note="", rows=report.published))
    else:
        blocks.append("No method of this run has a published number.")
    shown = {name for plate in [*plates, *(p for s in report.studies for p in s.plates)] for name in plate.published}
    for name in published.sources():
        if name not in shown:
            note = f"{published.about(name)} Nothing in this run matches it."
            stem = name.lower().replace(" ", "_")
            blocks.append(Sheet(name=f"published_{stem}", title=name, note=note, rows=published.figure(name)))
    return blocks


def _fairness(report: Report) -> list[Block]:
    if report.fairness.empty:
        return ["No method of this run drafts with a trained model."]
    return [Sheet(name="fairness", title="", note=fairness.NOTE, rows=report.fairness)]


def _machine(report: Report) -> list[Block]:
    return [
        Sheet(name="settings", title="", note="", rows=_methods(report)),
        Sheet(name="machine", title="", note="", rows=words.machine(report)),
        words.remake(report),
    ]


def _methods(report: Report) -> Frame:
    table = report.methods.astype(object)
    table["parameters"] = [f"{n / 1e6:.1f} million" if n and n == n else "none" for n in table["parameters"]]
    return table.where(table.notna(), "none")
