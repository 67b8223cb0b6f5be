"""Evaluate: decode one benchmark with one method.

    python -m stages.evaluate <profile> <benchmark> <method>

Reads   the verifier, data/<profile>/prompts/<benchmark>.parquet, the method's manifest and drafter, the vanilla cell
Writes  data/<profile>/cells/<benchmark>/<method>.parquet
Params  <profile>.evaluate.shared, <profile>.evaluate.<method>

The stage fails if a text differs from vanilla's where rounding does not explain it.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.common import entry, parallel, provenance, spread, store
from stages.common.params import keys_at, load
from stages.evaluate import harness
from stages.evaluate.contract import Sampling
from stages.evaluate.engine import Engine
from stages.evaluate.harness import Reference, Shared
from stages.evaluate.parts import (
    VANILLA,
    drafter_device,
    load_models,
    method_drafter,
    method_module,
    read_prompts,
    transfers,
)


def main(run: entry.Run) -> None:
    device = run.device()
    if not parallel.launch(run, spread.processes(device.placement)):
        evaluate(run.profile, run.benchmark, run.method, device, seed=load(int, "seed"))


def methods(_: str) -> list[str]:
    """Vanilla is always measured; params.yaml names the others."""
    return [VANILLA, *keys_at("methods")]


def evaluate(profile: str, benchmark: str, method: str, device: entry.Device, *, seed: int) -> None:
    module = method_module(method)
    shared = load(Shared, profile, "evaluate", "shared")
    params = load(module.Params, profile, "evaluate", method)
    verifier, tokenizer = load_models(profile, device)
    drafter, card = method_drafter(profile, method, verifier, tokenizer, device)
    decoder = module.build(params, drafter)
    prompts = read_prompts(profile, benchmark, tokenizer)
    engine = Engine(
        verifier,
        Sampling(temperature=shared.temperature, top_k=shared.top_k, top_p=shared.top_p, seed=seed),
        max_new_tokens=shared.max_new_tokens,
        drafter_device=drafter_device(device),
    )
    total, quiet = len(prompts) * shared.repeats, not spread.writes()
    with tqdm(total=total, desc=f"{benchmark} {method}", unit="text", mininterval=5, disable=quiet) as bar:
        rows, rounding = harness.measure(
            engine,
            decoder,
            prompts,
            shared,
            seed=seed,
            reference=vanilla_texts(profile, benchmark) if method != VANILLA else None,
            covered=None if drafter is None else drafter.t2d.cpu() >= 0,
            comparable=harness.greedy_or_match(shared, module.RULE),
            progress=bar,
        )
    for row in rows:
        row |= {"benchmark": benchmark, "method": method, "text": tokenizer.decode(row["output_ids"])}
        row |= {"answer": None, "correct": None}
    if not spread.writes():
        return
    path = store.cell_file(profile, benchmark, method)
    refuse_differences(rows, rounding, path)
    facts = {
        "profile": profile,
        "benchmark": benchmark,
        "method": method,
        "stamp": provenance.stamp(device=device.name, dtype=verifier.dtype) | spread.stamp(device.placement),
        "drafter": None if card is None else {"parameters": card.parameters, "objective": card.objective},
        "params": {"shared": asdict(shared), method: asdict(params)},
        "rounding": rounding,
        "peak_rss_mb": provenance.peak_rss_mb(),
        "command": provenance.command(),
        **transfers(engine),
    }
    store.write_parquet(path, rows, store.CELLS, facts)


def vanilla_texts(profile: str, benchmark: str) -> Reference:
    rows = store.read_parquet(store.cell_file(profile, benchmark, VANILLA), store.CELLS)
    return Reference(texts={(row["prompt_id"], row["repeat"]): row["output_ids"] for row in rows})


def refuse_differences(rows: list[dict[str, Any]], rounding: float, path: Path) -> None:
    """Fail on a difference that rounding does not explain; the rows are kept for a look."""
    bad = [row for row in rows if row["first_difference"] >= 0 and not row["excused"]]
    if not bad:
        return
    kept = store.scratch_file("differences", path.parent.name, f"{path.stem}.json")
    fields = ("prompt_id", "repeat", "first_difference", "top2_gap", "output_ids")
    store.write_json(kept, [{name: row[name] for name in fields} for row in bad])
    first = bad[0]
    raise ValueError(
        f"{path}: {len(bad)} of {len(rows)} texts differ from vanilla's, first {first['prompt_id']} at token "
        f"{first['first_difference']}, with a top-2 gap of {first['top2_gap']:.4g} and rounding of {rounding:.2g}: "
        f"not lossless. The texts are in {kept}"
    )


if __name__ == "__main__":
    entry.run(main, benchmark=lambda _: keys_at("benchmarks"), method=methods)
