"""Points: check the form of every sweep and list what those in `sweeps` will measure.

    python -m stages.points <profile>

Writes  data/<profile>/sweeps/points.json
Params  sweeps, <profile>.sweeps

Looks at params.yaml alone, so that a mistake in a sweep shows before hours of training. What the report depends on is
there even where no sweep is measured.
"""

from stages.common import entry, store, studies, sweeps
from stages.common.params import keys_at


def main(run: entry.Run) -> None:
    forms = {name: sweeps.read(run.profile, name) for name in keys_at(run.profile, "sweeps")}
    found = {}
    for name in sweeps.names():
        form = forms.get(name) or sweeps.read(run.profile, name)
        points = [point.name for point in sweeps.points(form)]
        found[name] = {"title": form.title or name, "beside": list(form.beside), "points": points}
    store.write_json(studies.points_file(run.profile), found)


if __name__ == "__main__":
    entry.run(main, compute=False)
