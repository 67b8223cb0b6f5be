"""The training prompts: maths, code and open instructions, mixed by params.

    reads   data/<p>/models/verifier (tokenizer; the model where a part is written by it)
    writes  data/<p>/prompts/corpus.parquet
    params  seed, <p>.device, <p>.download.corpus, <p>.download.held_out_templates

The paper's corpus covers GSM8K, Alpaca and LiveCodeBench prompts; this one covers the same three kinds
without a hub. It never looks at a benchmark: a new benchmark must not change the training data. The
benchmarks look at it.
"""

import platform
from collections.abc import Callable, Sequence
from typing import Any

from stages.common import store
from stages.common.params import ParamError
from stages.download.collect import Encode, items_of, require, rows, worded
from stages.download.items import Item, spread, without_duplicates
from stages.download.params import Corpus, Magpie, Stdlib, recorded


def make_corpus(
    profile: str,
    params: Corpus,
    *,
    held_out: Sequence[int],
    seed: int,
    encode: Encode,
    magpie: Callable[[Magpie], list[Item]],
) -> dict[str, int]:
    """Write the corpus; number of prompts by part."""
    found: list[dict[str, Any]] = []
    sizes: dict[str, dict[str, int]] = {}
    for name, part in params.parts.items():
        if part.turns != "first":
            raise ParamError(
                f"params.yaml: {profile}.download.corpus.parts.{name}.turns: training takes the first only"
            )
        pool = items_of(part, name=name, held_out=held_out, magpie=magpie)
        single = without_duplicates(pool)
        short = [item for item in single if len(encode([worded(item.text, part.wording)])) <= params.max_prompt_tokens]
        require(short, part.limit, key=f"{profile}.download.corpus.parts.{name}")
        chosen = spread(short, part.limit, seed=f"{seed}/{name}")
        sizes[name] = {"pool": len(pool), "without_duplicates": len(single), "short_enough": len(short)}
        for item in chosen:
            found += rows(item, split="train", wording=part.wording, encode=encode, prefix=f"{name}/")
    provenance = {
        "profile": profile,
        "seed": seed,
        "params": recorded(params),
        "held_out_templates": list(held_out),
        "sizes": sizes,
        "python": platform.python_version() if uses_stdlib(params) else None,
    }
    store.write_parquet(store.corpus_file(profile), found, store.PROMPTS, provenance)
    return {name: part.limit for name, part in params.parts.items()}


def uses_stdlib(params: Corpus) -> bool:
    return any(isinstance(part.source, Stdlib) for part in params.parts.values())
