"""Points: check the form of every sweep and list what those in `sweeps` will measure.

    python -m stages.points <profile>

Writes  data/<profile>/sweeps/points.json
Params  benchmarks, features, graded, reasoning, soft_objectives, sweeps, <profile>.sweeps, <profile>.score.graders

Looks at params.yaml alone, so that a mistake in a sweep, or in what is graded, shows before hours of training. What the
report depends on is there even where no sweep is measured.
"""

from stages.common import entry, store, studies, sweeps
from stages.common.params import ParamError, keys_at, load
from stages.common.sweeps import Sweep

VANILLA, METHOD = "vanilla", "method"
CHECK = "check"  # what else stage `score` does


def main(run: entry.Run) -> None:
    forms, measured = load(dict[str, Sweep], run.profile, "sweeps"), sweeps.names()
    for name in (*forms, *measured):
        sweeps.refuse_name(name)
    there, found = (*keys_at("benchmarks"), *keys_at("reasoning")), {}
    for name in measured:
        form = forms.get(name) or sweeps.read(run.profile, name)  # which says that there is none
        if form.benchmark not in there:
            raise ParamError(
                f"params.yaml: {run.profile}.sweeps.{name}.benchmark: {form.benchmark!r} is not downloaded; "
                "name it in reasoning, or in benchmarks"
            )
        points = [point.name for point in sweeps.points(form)]
        found[name] = {"title": form.title or name, "beside": list(form.beside), "points": points}
    graders = load(dict[str, str], run.profile, "score", "graders")
    for name in keys_at("graded"):
        if name not in measured or name == CHECK:
            raise ParamError(f"params.yaml: graded: {name!r} is not among sweeps; name it there, too")
        refuse_ungradable(run.profile, name, forms[name], graders)
    if keys_at("soft_objectives") and not keys_at("features"):
        raise ParamError("params.yaml: soft_objectives: they learn from hidden states; write features: [verifier], too")
    store.write_json(studies.points_file(run.profile), found)


def refuse_ungradable(profile: str, name: str, form: Sweep, graders: dict[str, str]) -> None:
    """ParamError: a graded sweep has no grader, or does not compare methods with vanilla."""
    if form.benchmark not in graders:
        raise ParamError(
            f"params.yaml: {profile}.score.graders.{form.benchmark}: missing; graded sweep {name!r} is of it"
        )
    if form.x != METHOD or set(form.vary) != {METHOD} or VANILLA not in form.vary[METHOD]:
        raise ParamError(
            f"params.yaml: {profile}.sweeps.{name}: a graded sweep varies the method alone, {VANILLA} among them, "
            "and has x: method"
        )


if __name__ == "__main__":
    entry.run(main, compute=False)
