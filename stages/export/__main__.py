"""Export: a drafter as a folder for others, with a model card.

    python -m stages.export <profile> <drafter>

Reads   the verifier, data/<profile>/drafters/<drafter>/, data/<profile>/prompts/
Writes  data/<profile>/exports/<drafter>/
Params  seed, export, benchmarks, <profile>.device, <profile>.evaluate

The folder is read back and must draft and be accepted, cycle by cycle, as the drafter that it came from, on benchmark
prompts, which no training has seen; otherwise the stage fails and no folder is left.
"""

from dataclasses import dataclass
from pathlib import Path

from stages.common import entry, provenance, spread, store
from stages.common.models import resolve_dtype
from stages.common.params import Count, keys_at, load
from stages.evaluate.parts import load_models
from stages.export import card, forms, gate


@dataclass(frozen=True, kw_only=True)
class Params:
    """`export`."""

    prompts: Count  # on which the folder must be accepted as the drafter is
    merge: bool  # a LoRA adapter becomes weights; else it lies beside those of its base


def main(run: entry.Run) -> None:
    export(run.profile, run.drafter, load(Params, "export"), run.device(), seed=load(int, "seed"))


def export(profile: str, name: str, params: Params, device: entry.Device, *, seed: int) -> None:
    source = store.drafter_folder(profile, name)
    if not source.exists():
        raise ValueError(f"params.yaml: exports: no drafter {name!r} in {source.parent}; train it, or correct the list")
    spread.refuse_ranks(device.placement, "exports")
    verifier, tokenizer = load_models(profile, device)
    kind = store.read_json(source / "drafter.json")["kind"]
    method = gate.method_for(profile, name, kind)
    prompts = gate.held_out(profile, tokenizer, keys_at("benchmarks"), count=params.prompts)
    made = forms.Maker(profile, source, verifier, tokenizer, dtype=resolve_dtype(device.dtype, device.name))
    wanted = gate.accepted(profile, method, made.original(), verifier, prompts, seed=seed)
    with store.replace_folder(store.export_folder(profile, name)) as out:
        form = made.write(out, merge=params.merge)
        found = gate.accepted(profile, method, made.reload(out), verifier, prompts, seed=seed)
        gate.refuse_difference(out, wanted, found)
        facts = {
            "method": method,
            "prompts": len(prompts),
            "acceptance_length": gate.acceptance_length(found),
            "stamp": provenance.stamp(device=device.name, dtype=verifier.dtype),
        }
        store.write_json(out / "acceptance.json", facts)
        store.write_text(out / "README.md", card.text(profile, name, out, form, facts))


def drafters(profile: str) -> list[str]:
    """Those that `exports` names, and any other that is there: an export needs no params of its own."""
    folder = store.drafter_folder(profile, "any").parent
    there = sorted(path.name for path in Path(folder).iterdir() if path.is_dir()) if folder.exists() else []
    return list(dict.fromkeys([*keys_at("exports"), *there]))


if __name__ == "__main__":
    entry.run(main, drafter=drafters)
