"""Baselines: train one of the drafters that SpecDiff-2 is compared with.

    python -m stages.baselines <profile> <baseline>

Reads   the verifier, data/<profile>/trajectories.parquet and features/
Writes  data/<profile>/drafters/<baseline>/, data/<profile>/curves/<baseline>.csv
Params  seed, <profile>.device, <profile>.validation, <profile>.baselines.<baseline>

Each has a module beside this one with its `Params` and a `train` that says what it learns.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path

from stages.common import entry
from stages.common.params import keys_at, load
from stages.common.validation import Validation

APART = ("__init__", "__main__", "fit", "one_layer", "window_heads")  # no baselines


def main(run: entry.Run) -> None:
    name = f"stages.baselines.{run.baseline}"
    if run.baseline in APART or find_spec(name) is None:
        known = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in APART)
        raise ValueError(f"params.yaml: baselines: no baseline {run.baseline!r}; there are {', '.join(known)}")
    module = importlib.import_module(name)
    params = load(module.Params, run.profile, "baselines", run.baseline)
    v = load(Validation, run.profile, "validation")
    module.train(run.profile, params, v, run.device(), seed=load(int, "seed"))


if __name__ == "__main__":
    entry.run(main, baseline=lambda profile: keys_at("baselines"))
