"""Decode the corpus shard by shard; a shard that is whole on disk is not decoded again.

Shards are runs of the corpus in its own order, so a resumed run decodes the very batches of an undisturbed
one, and the output has the same bytes.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from stages.common import contexts, provenance, scratch, store
from stages.common.decode import decode_batch
from stages.common.entry import Device
from stages.common.models import Verifier, load_tokenizer, load_verifier, resolve_dtype
from stages.common.params import Between, Count, Natural, NonNegative

ROOT = Path(__file__).parents[2]
# Whatever can change an answer: an edit of any of them starts the run over.
CODE = (
    *(ROOT / "kernels" / f"{name}.py" for name in ("cache", "sampling", "window")),
    *(ROOT / "stages" / "common" / f"{name}.py" for name in ("contexts", "decode", "models")),
    ROOT / "stages" / "trajectories" / "write.py",
)


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """`<profile>.trajectories`."""

    temperature: NonNegative  # the verifier's own, T_v
    top_k: Natural  # 0: all
    top_p: Annotated[float, Between(1e-6, 1.0)]
    max_new_tokens: Count
    batch_size: Count  # texts decoded side by side
    keep_layers: tuple[int, ...]  # of the verifier, whose keys and values are kept for drafters that read them
    shard_size: Count  # texts between two saves

    def __post_init__(self) -> None:
        if len(set(self.keep_layers)) < len(self.keep_layers):
            raise ValueError(f"keep_layers: {list(self.keep_layers)} names a layer twice; write each once")


def write_trajectories(profile: str, params: Trajectories, *, seed: int, device: Device) -> None:
    """Read the corpus and the verifier of a profile, write its trajectories."""
    corpus_path, model_path = store.corpus_file(profile), store.verifier_folder(profile)
    corpus = store.read_parquet(corpus_path, store.PROMPTS)
    check_ids(corpus_path, [row["id"] for row in corpus])
    dtype = resolve_dtype(device.dtype, device.name)
    stamp = provenance.stamp(device=device.name, dtype=dtype)
    mark = scratch.fingerprint(
        {"trajectories": params, "seed": seed, "stamp": stamp},
        {"corpus": store.sha256_file(corpus_path), "verifier": store.sha256_folder(model_path)},
        CODE,
    )
    tokenizer = load_tokenizer(model_path)
    prompts = [tokenizer.encode_prompt(row["turns"]) for row in corpus]
    verifier = load_verifier(model_path, dtype=dtype, device=device.name)
    check_prompts(corpus_path, corpus, prompts, limit=verifier.context_limit)

    rows: list[dict[str, Any]] = []
    files: dict[str, str] = {}
    unfinished = scratch.scratch_folder(mark)
    with tqdm(total=len(corpus), desc="trajectories", unit="text", smoothing=0, mininterval=1.0) as bar:
        for number, shard in enumerate(
            decode_shards(
                verifier,
                [row["id"] for row in corpus],
                prompts,
                params,
                seed=seed,
                folder=unfinished,
                bar=bar,
            )
        ):
            rows += shard
            if params.keep_layers:
                files |= {row["id"]: contexts_name(number) for row in shard if row["output_ids"]}
    with store.replace_folder(store.contexts_folder(profile)) as out:
        for name in sorted(set(files.values())):
            link_or_copy(unfinished / name, out / name)
        contexts.write_index(out, params.keep_layers, files)
    made_with = {"stamp": stamp, "profile": profile, "seed": seed, "params": asdict(params)}
    made_with["command"] = provenance.command()
    store.write_parquet(store.trajectories_file(profile), rows, store.TRAJECTORIES, made_with)
    scratch.discard(mark)


def decode_shards(
    verifier: Verifier,
    ids: Sequence[str],
    prompts: Sequence[list[int]],
    params: Trajectories,
    *,
    seed: int,
    folder: Path,
    bar: Any,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each shard in turn: read back if an earlier run finished it, else decoded and saved."""
    tokens = 0

    def advance(new_tokens: int, finished: int) -> None:
        nonlocal tokens
        tokens += new_tokens
        bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
        bar.update(finished)

    for number, start in enumerate(range(0, len(ids), params.shard_size)):
        span = slice(start, start + params.shard_size)
        path = folder / f"shard_{number:05}.parquet"
        context = folder / contexts_name(number) if params.keep_layers else None
        rows = finished_shard(path, ids[span])
        if rows is not None and context is not None:
            rows = rows if contexts.holds(context, [row["id"] for row in rows if row["output_ids"]]) else None
        if rows is not None:
            # Not this run's work: it must not count in the rate that the time left is told from.
            bar.initial += len(rows)
            bar.update(len(rows))
        else:
            decoded = decode_batch(
                verifier,
                prompts[span],
                keys=ids[span],
                seed=seed,
                temperature=params.temperature,
                max_new_tokens=params.max_new_tokens,
                batch_size=params.batch_size,
                top_k=params.top_k,
                top_p=params.top_p,
                keep_layers=params.keep_layers,
                progress=advance,
            )
            if context is not None:
                kept = zip(ids[span], decoded, strict=True)
                contexts.write_shard(context, {name: text.context for name, text in kept if text.context is not None})
            rows = [
                {
                    "id": prompt_id,
                    "prompt_ids": prompt,
                    "output_ids": answer.output_ids,
                    "finish_reason": answer.finish_reason,
                    "temperature": params.temperature,
                    "seed": seed,
                }
                for prompt_id, prompt, answer in zip(ids[span], prompts[span], decoded, strict=True)
            ]
            store.write_parquet(path, rows, store.TRAJECTORIES, {})
        yield rows


def contexts_name(number: int) -> str:
    """The file of one shard's contexts."""
    return f"{number:05}.safetensors"


def finished_shard(path: Path, ids: Sequence[str]) -> list[dict[str, Any]] | None:
    """Rows of a whole shard of just these prompts; None if it is absent or damaged, and must be decoded."""
    if not path.exists():
        return None
    try:
        rows = store.read_parquet(path, store.TRAJECTORIES)
    except ValueError:
        return None
    return rows if [row["id"] for row in rows] == list(ids) else None


def link_or_copy(source: Path, target: Path) -> None:
    """A second name of a file where the file system has such; contexts are large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def check_ids(path: Path, ids: Sequence[str]) -> None:
    """A corpus has prompts, and each has a name of its own: the name is the key of its noise."""
    if not ids:
        raise ValueError(f"{path}: no prompts; give <profile>.download.corpus a source with a size above 0")
    if repeated := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"{path}: ids come more than once: {', '.join(repeated[:5])}; run dvc repro corpus")
    if "__metadata__" in ids:
        raise ValueError(f"{path}: no prompt may be called __metadata__, which safetensors files keep for themselves")


def check_prompts(path: Path, corpus: Sequence[dict[str, Any]], prompts: Sequence[list[int]], *, limit: int) -> None:
    """Each prompt comes once (a copy would stand on both sides of a validation split) and leaves room."""
    first: dict[tuple[int, ...], str] = {}
    for row, prompt in zip(corpus, prompts, strict=True):
        if len(prompt) >= limit:
            raise ValueError(
                f"{path}: prompt {row['id']!r} has {len(prompt)} tokens, the verifier's context {limit}; "
                "leave it out of <profile>.download.corpus"
            )
        other = first.setdefault(tuple(prompt), row["id"])
        if other != row["id"]:
            raise ValueError(
                f"{path}: prompts {other!r} and {row['id']!r} are the same text; "
                "leave one out of <profile>.download.corpus"
            )
