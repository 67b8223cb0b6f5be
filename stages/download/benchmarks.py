"""The evaluation prompts of one benchmark, checked against the training corpus.

    reads   data/<p>/models/verifier (tokenizer), data/<p>/prompts/corpus.parquet
    writes  data/<p>/prompts/<benchmark>.parquet
    params  seed, <p>.download.benchmarks.<benchmark>, <p>.download.guard, <p>.download.held_out_templates

Computed sources draw from a pool, so an item that the corpus has too is passed over. A fixed benchmark is
taken as it is: there the guard stops.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stages.common import store
from stages.download import guard
from stages.download.collect import Encode, items_of, require, rows
from stages.download.items import Item, spread, without_duplicates
from stages.download.params import Benchmark, Generator, Guard, Made, recorded


def make_benchmark(
    profile: str,
    name: str,
    params: Benchmark,
    *,
    limits: Guard,
    held_out: Sequence[int],
    seed: int,
    encode: Encode,
) -> dict[str, int]:
    """Write the benchmark's prompts; number of prompts by split."""
    trained = store.read_parquet(store.corpus_file(profile), store.PROMPTS)
    corpus = guard.Corpus({row["id"]: "\n".join(row["turns"]) for row in trained}, ngram=limits.ngram)
    splits: dict[str, list[Item]] = {}
    passed_over: dict[str, int] = {}
    for split, part in params.splits.items():
        pool = items_of(part, name=name, held_out=held_out, magpie=None)
        fresh = pool
        if isinstance(part.source, Generator | Made):
            fresh = [item for item in without_duplicates(pool) if not corpus.exact(item.text)]
        if isinstance(part.source, Generator) and part.source.templates == "held_out":
            guard.check_templates(fresh, {row["id"]: row["category"] for row in trained})
        passed_over[split] = len(pool) - len(fresh)
        require(fresh, part.limit, key=f"{profile}.download.benchmarks.{name}.splits.{split}")
        splits[split] = spread(fresh, part.limit, seed=f"{seed}/{name}/{split}")
    shared = guard.check(splits, corpus, limits, shared_templates=params.shared_templates)
    store.write_parquet(
        store.prompts_file(profile, name),
        _rows(splits, params, encode, key=f"{profile}.download.benchmarks.{name}"),
        store.PROMPTS,
        {
            "profile": profile,
            "benchmark": name,
            "seed": seed,
            "params": recorded(params),
            "held_out_templates": list(held_out),
            "passed_over": passed_over,
            "guard": asdict(limits) | {"corpus_prompts": len(trained), "near_duplicates_declared": shared},
        },
    )
    return {split: len(items) for split, items in splits.items()}


def _rows(splits: dict[str, list[Item]], params: Benchmark, encode: Encode, *, key: str) -> list[dict[str, Any]]:
    found = [
        row
        for split, items in splits.items()
        for item in items
        for row in rows(item, split=split, wording=params.splits[split].wording, encode=encode)
    ]
    names = [row["id"] for row in found]
    if len(set(names)) < len(names):
        raise ValueError(f"params.yaml: {key}: splits share prompts; give them different seeds or files")
    return found
