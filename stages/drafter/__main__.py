"""Drafter: pin which trained drafter a method drafts with.

    python -m stages.drafter <profile> <method>

Reads   data/<profile>/drafters/
Writes  data/<profile>/drafts_with/<method>.json
Params  <profile>.evaluate.<method>

The manifest carries the hash of the drafter's folder. Cells depend on the manifest, so a retrained drafter reruns the
cells of its own methods and no others, and which drafter a method uses is a value in params.yaml. A method that drafts
without a model has null there, and a manifest that says so.
"""

from typing import cast

from stages.common import entry, store
from stages.common.params import keys_at, load


def main(run: entry.Run) -> None:
    name = load(cast("type[str | None]", str | None), run.profile, "evaluate", run.method, "drafter")
    path = store.manifest_file(run.profile, run.method)
    if name is None:
        store.write_json(path, {"method": run.method, "drafter": None})
        return
    folder = store.drafter_folder(run.profile, name)
    if not folder.exists():
        known = sorted(path.name for path in folder.parent.iterdir()) if folder.parent.exists() else []
        raise ValueError(
            f"params.yaml: {run.profile}.evaluate.{run.method}.drafter: no drafter {name!r}; "
            f"trained: {', '.join(known)}"
        )
    manifest = {
        "method": run.method,
        "drafter": name,
        "folder": folder.as_posix(),
        "sha256": store.sha256_folder(folder),
    }
    store.write_json(path, manifest)


if __name__ == "__main__":
    entry.run(main, compute=False, method=lambda profile: keys_at("methods"))
