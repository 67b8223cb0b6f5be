"""Our engine beside what a user would pick instead, on a CPU: same model, prompts, threads and process, batch 1, T = 0.

    python -m tests.benchmarks.peers --model data/cpu/models/verifier --prompts data/cpu/prompts/gsm_symbolic.parquet \\
        --count 24 --max-new-tokens 96 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out reports/benchmarks/peers

Systems: methods of ours by name, transformers' `generate`, its assisted generation and its prompt lookup, and the
packages flashspec, sequential-speculative-decoding, dflash and llama-cpp-python where they are installed (packages.py
says what each is). They take turns prompt by prompt, another first each time (side_by_side.py). One that cannot run is
listed with the reason. Peak memory is that of a fresh process which loads one system alone and answers the first
prompt. Run it on an idle machine.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import checkout, side_by_side, tables
from tests.benchmarks.checkout import Models
from tests.benchmarks.packages import DFlash, FlashSpec, LlamaCpp, Sequential
from tests.benchmarks.side_by_side import Measured, System
from tests.benchmarks.systems import Assisted, Generate, Ours, PromptLookup

REFERENCE, BASE = "ours: vanilla", "transformers generate"
METHODS = ("vanilla", "specdiff2_tree", "specdiff2_fed")
ROOT = Path(__file__).resolve().parents[2]


def all_systems(models: Models, args: argparse.Namespace, *, longest: int) -> list[System]:
    """longest: tokens of the longest prompt."""
    ours = [Ours(models, method) for method in dict.fromkeys(["vanilla", *args.methods])]
    return [
        *ours,
        Generate(models),
        Assisted(models),
        PromptLookup(models, tokens=args.lookup_tokens),
        FlashSpec(models),
        Sequential(models),
        DFlash(models, args.dflash_draft),
        LlamaCpp(models, args.gguf, threads=torch.get_num_threads(), context=longest + args.max_new_tokens),
    ]


def chosen(systems: Sequence[System], names: Sequence[str]) -> list[System]:
    """Those named, with the two that the others are compared with; all if none is named."""
    known = [system.name for system in systems]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"--systems: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return [system for system in systems if not names or system.name in {*names, REFERENCE, BASE}]


def peak_mb() -> float:
    """Largest resident memory of this process, in MB; NaN where the system does not tell.

    From VmHWM, not getrusage: that one starts with what the parent held.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), float("nan"))


def peak_alone(name: str, argv: Sequence[str]) -> float | None:
    """Peak memory of a process of its own that runs this system only; None if it fails."""
    command = [sys.executable, "-m", "tests.benchmarks.peers", *argv, "--alone", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name}: no memory measured: {(done.stderr.splitlines() or [''])[-1]}", flush=True)
        return None
    return float(done.stdout.splitlines()[-1])


def shown(row: dict[str, Any], system: System, peak: float | None) -> dict[str, str]:
    decode, place = row["decode_tokens_per_s"], row["first_difference"]
    return {
        "system": f"{system.name} {system.version}".strip(),
        "tokens/s": f"{row['tokens_per_s']:.1f}",
        "times `generate` (95 %)": tables.interval(row["ratio"], row["ratio_low"], row["ratio_high"]),
        "tokens/s, prompt apart": "" if decode is None else f"{decode:.1f}",
        "tokens per call": f"{row['tokens_per_call']:.2f}",
        "equal texts": f"{row['equal_texts']} of {row['prompts']}",
        "differs at token (median)": "" if place is None else f"{place:.0f}",
        "peak MB": "" if peak is None else f"{peak:.0f}",
        "note": system.note,
    }


def page(
    systems: Sequence[System], measured: Measured, peaks: dict[str, float | None], lines: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Lines of the page and rows of the CSV, the skipped systems in both."""
    rows: list[dict[str, Any]] = []
    table: list[dict[str, str]] = []
    for system in systems:
        about = {"version": system.version, "note": system.note}
        if system.name in measured.skipped:
            rows.append({"system": system.name, **about, "skipped": measured.skipped[system.name]})
            continue
        row = side_by_side.row(system.name, measured, reference=REFERENCE, base=BASE)
        rows.append({**row, "peak_mb": peaks.get(system.name), **about})
        table.append(shown(row, system, peaks.get(system.name)))
    skipped = [f"- {name}: {reason}" for name, reason in measured.skipped.items()]
    legend = (
        "Whole answers, the prompt's pass included. `tokens per call`: new tokens over counted passes of the verifier, "
        "the prompt's as one; plain decoding has 1. `equal texts`: token for token with our vanilla. `peak MB`: of a "
        "fresh process that runs this system alone, Python and loading included."
    )
    tail = ["", "Not run:", "", *skipped] if skipped else []
    return [*lines, *tables.markdown(table), "", legend, *tail], sorted(rows, key=lambda row: "skipped" in row)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = checkout.parser_of("tests.benchmarks.peers", __doc__, max_new_tokens=96)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="of ours; vanilla always is")
    parser.add_argument("--systems", nargs="*", default=[], help="only these, by the table's names")
    parser.add_argument("--lookup-tokens", type=int, default=10)
    parser.add_argument("--warm-up-tokens", type=int, default=16)
    parser.add_argument("--gguf", type=Path, help="for llama.cpp: the file that the verifier was unpacked from")
    parser.add_argument("--dflash-draft", type=Path, help="folder of a draft model of dflash for this verifier")
    parser.add_argument("--no-memory", action="store_true", help="no process of its own for each system's memory")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    models, prompts = checkout.open_checkout(args)
    systems = chosen(all_systems(models, args, longest=max(map(len, prompts))), args.systems)
    if args.alone:
        next(system for system in systems if system.name == args.alone).generate(prompts[0], args.max_new_tokens)
        print(peak_mb())
        return
    measured = side_by_side.measure(
        systems,
        prompts,
        max_new_tokens=args.max_new_tokens,
        warm_up_tokens=args.warm_up_tokens,
        say=lambda line: print(line, flush=True),
    )
    for name in (REFERENCE, BASE):
        if name in measured.skipped:
            raise ValueError(f"{name} is what the others are compared with, and it {measured.skipped[name]}")
    peaks = {} if args.no_memory else {name: peak_alone(name, words) for name in measured.texts}
    lengths = sorted(map(len, prompts))
    about = (
        f"The first {len(prompts)} prompts of {args.prompts.name}, {lengths[0]} to {lengths[-1]} tokens, at most "
        f"{args.max_new_tokens} new tokens, greedy, one at a time, systems interleaved in one process."
    )
    lines = tables.setting("tests.benchmarks.peers", dtype=models.dtype, root=ROOT, argv=words)
    tables.publish(args.out, *page(systems, measured, peaks, [*lines, about, ""]))


if __name__ == "__main__":
    checkout.run(main)
