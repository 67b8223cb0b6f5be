"""Sizes: the drafter of `adapt` with other layers of the verifier kept, for speed-up against drafter size.

Or with another prefix, for one mask against the other: `{layers: [], prefix: bidirectional}` beside an `adapt` that
starts from a published drafter and caches its prefix.

    python -m stages.sizes <profile> <size>

Reads   the verifier, data/<profile>/trajectories.parquet and contexts/
Writes  data/<profile>/drafters_of_size/<size>/, data/<profile>/curves/size_<size>.csv
Params  seed, <profile>.device, <profile>.adapt, <profile>.sizes.<size>, <profile>.validation

Everything else is as in `adapt`: words, prefix, windows, steps, order of texts. Seconds of training are not
equal: a smaller drafter takes fewer.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from kernels import objectives
from stages.common import entry, lora, parallel, provenance, scratch, starts, store, studies, training
from stages.common.drafters import DrafterCard, Prefix
from stages.common.params import Count, ParamError, keys_at, load
from stages.common.starts import Adapt
from stages.common.validation import Validation


@dataclass(frozen=True, kw_only=True)
class Size:
    """`<profile>.sizes.<name>`. What is None is as in adapt.

    windows, sequences: of `training`, which another prefix may need otherwise.
    """

    layers: tuple[int, ...]  # the verifier's that stay: some of trajectories.keep_layers where the prefix is its own
    prefix: Prefix | None = None
    windows: Count | None = None
    sequences: Count | None = None


def main(run: entry.Run) -> None:
    recipe, size = load(Adapt, run.profile, "adapt"), load(Size, run.profile, "sizes", run.size)
    v = load(Validation, run.profile, "validation")
    if parallel.launch(run, parallel.processes(recipe.training.parallel)):
        return
    with parallel.joined(run.device().name):
        grow(run.profile, run.size, size, recipe, v, run.device(), seed=load(int, "seed"))


def grow(profile: str, name: str, size: Size, recipe: Adapt, v: Validation, device: entry.Device, *, seed: int) -> None:
    """Train and write one drafter."""
    key = f"{profile}.sizes.{name}"
    if recipe.start == "verifier" and not size.layers:
        raise ParamError(f"params.yaml: {key}.layers: empty; name a layer of the verifier at least")
    if recipe.start == "drafter" and size.layers:
        raise ParamError(f"params.yaml: {key}.layers: adapt starts from a drafter, which is taken whole; write []")
    if recipe.start == "drafter" and size.prefix == "verifier":
        raise ParamError(f"params.yaml: {key}.prefix: a drafter never reads the verifier's; write own or bidirectional")
    changed = {name: value for name in ("windows", "sequences") if (value := getattr(size, name)) is not None}
    t = replace(recipe.training, **changed)
    try:
        drafter, texts, digests, facts = starts.start(
            profile,
            recipe.start,
            v,
            t,
            device,
            layers=size.layers,
            prefix=size.prefix or recipe.prefix,
            draft_vocab=recipe.draft_vocab,
            seed=seed,
        )
    except ValueError as error:  # what looks at layers takes them for adapt's
        raise ValueError(str(error).replace("adapt.layers", f"{key}.layers")) from None
    parameters = sum(p.numel() for p in drafter.trained())
    if t.steps:
        lora.ready(drafter, t.lora, seed=seed)
    drafter = drafter.to(parallel.local_device(device.name))
    for p in drafter.trained():
        p.requires_grad_(t.steps > 0)

    decides = [size, replace(recipe, training=training.alone(t)), training.state_form(t, device), v, seed]
    mark = scratch.fingerprint(decides, {**digests, "stage": f"size {name}"}, CODE)
    rows = training.train(
        drafter,
        texts,
        objectives.masked_ce,
        t,
        v,
        seed=seed,
        scratch=scratch.scratch_folder(mark),
        title=f"size {name}",
        dtype=training.passes_in(device),
    )
    card = DrafterCard(
        block_size=t.window,
        parameters=parameters,
        provenance={"command": provenance.command(), "sha256": digests, "steps": t.steps, "seed": seed},
        **facts,
    )
    training.write(studies.size_folder(profile, name), drafter, card, t)
    if parallel.first():
        store.write_text(store.curves_file(profile, f"size_{name}"), training.curve_csv(rows))
        scratch.discard(mark)


CODE = [Path(__file__), Path(starts.__file__), *training.CODE]

if __name__ == "__main__":
    entry.run(main, size=lambda profile: keys_at("sizes"))
