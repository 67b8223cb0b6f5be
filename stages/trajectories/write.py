"""The stage's work: which shards are missing, who decodes them, and the outputs put together.

Several processes share the shards that are missing; which of them decoded one leaves no trace, and the first puts all
together, in the corpus's order.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages.common import provenance, scratch, store
from stages.common.decode import Decoded, decode_batch
from stages.common.entry import Device
from stages.common.models import load_tokenizer, load_verifier, resolve_dtype, sizes_of
from stages.trajectories import vllm
from stages.trajectories.params import Trajectories, Vllm
from stages.trajectories.ranks import Ranks, together
from stages.trajectories.shards import Shards

ROOT = Path(__file__).parents[2]
# Whatever can change an answer: an edit of any of them starts the run over.
CODE = (
    *(ROOT / "kernels" / f"{name}.py" for name in ("cache", "sampling", "window")),
    *(ROOT / "stages" / "common" / f"{name}.py" for name in ("contexts", "decode", "models")),
    *(ROOT / "stages" / "trajectories" / f"{name}.py" for name in ("shards", "vllm", "write")),
)

Progress = Callable[[int, int], None]  # of a pass: the tokens and the finished texts it brought
Decode = Callable[[Sequence[str], Sequence[list[int]], Progress], list[Decoded]]  # of ids and prompts, in their order


def write_trajectories(profile: str, params: Trajectories, *, seed: int, device: Device) -> None:
    """Read the corpus and the verifier of a profile, write its trajectories; called in every process of the run."""
    with together() as ranks:
        _write(profile, params, seed=seed, device=device, ranks=ranks)


def _write(profile: str, params: Trajectories, *, seed: int, device: Device, ranks: Ranks) -> None:
    check_ranks(params, device, ranks)
    corpus_path, model_path = store.corpus_file(profile), store.verifier_folder(profile)
    corpus = store.read_parquet(corpus_path, store.PROMPTS)
    ids = [row["id"] for row in corpus]
    check_ids(corpus_path, ids)
    place, dtype = ranks.device(device.name), resolve_dtype(device.dtype, device.name)
    made_with: dict[str, Any] = {
        "stamp": provenance.stamp(device=place, dtype=dtype),
        "profile": profile,
        "seed": seed,
        "params": params.described(),
    }
    if isinstance(params.engine, Vllm):
        made_with["engine"] = {"name": "vllm", "version": vllm.version()}
    mark = scratch.fingerprint(
        made_with,
        {"corpus": store.sha256_file(corpus_path), "verifier": store.sha256_folder(model_path)},
        CODE,
    )
    tokenizer = load_tokenizer(model_path)
    prompts = [tokenizer.encode_prompt(row["turns"]) for row in corpus]
    check_prompts(corpus_path, corpus, prompts, limit=sizes_of(model_path).context_limit)
    shards = Shards(scratch.scratch_folder(mark), ids, prompts, params, seed=seed)

    missing = [number for number in range(shards.count) if shards.stored(number) is None]
    ranks.wait()  # nobody writes before all have looked: all find the same ones missing
    mine = missing[ranks.rank :: ranks.world]
    if mine:
        engine = start_vllm if isinstance(params.engine, Vllm) else start_transformers
        decode = engine(model_path, params, prompts, words=tokenizer.size, seed=seed, dtype=dtype, place=place)
        decode_shards(shards, decode, mine, ranks=ranks)
    ranks.wait()
    if ranks.rank == 0:
        rows = shards.put_together(store.contexts_folder(profile))
        made_with["command"] = provenance.command()
        store.write_parquet(store.trajectories_file(profile), rows, store.TRAJECTORIES, made_with)
        scratch.discard(mark)
    ranks.wait()


def start_transformers(
    folder: Path,
    params: Trajectories,
    prompts: Sequence[list[int]],
    *,
    words: int,
    seed: int,
    dtype: torch.dtype,
    place: str,
) -> Decode:
    """The decoder of this project over a verifier of transformers."""
    verifier = load_verifier(folder, dtype=dtype, device=place)

    def decode(ids: Sequence[str], prompts: Sequence[list[int]], progress: Progress) -> list[Decoded]:
        return decode_batch(
            verifier,
            prompts,
            keys=ids,
            seed=seed,
            temperature=params.temperature,
            max_new_tokens=params.max_new_tokens,
            batch_size=params.batch_size,
            top_k=params.top_k,
            top_p=params.top_p,
            keep_layers=params.keep_layers,
            progress=progress,
        )

    return decode


def start_vllm(
    folder: Path,
    params: Trajectories,
    prompts: Sequence[list[int]],
    *,
    words: int,
    seed: int,
    dtype: torch.dtype,
    place: str,
) -> Decode:
    """vLLM, which tells of a shard when it is whole. `prompts`: all of the corpus."""
    engine = vllm.Engine(
        folder, params, seed=seed, dtype=dtype, longest=max(map(len, prompts)), words=words, sizes=sizes_of(folder)
    )

    def decode(ids: Sequence[str], prompts: Sequence[list[int]], progress: Progress) -> list[Decoded]:
        decoded = engine.decode(ids, prompts)
        progress(sum(len(text.output_ids) for text in decoded), len(decoded))
        return decoded

    return decode


def decode_shards(shards: Shards, decode: Decode, mine: Sequence[int], *, ranks: Ranks) -> None:
    """Decode and save these shards in turn. The first process shows how far it is with its own share."""
    share = sum(len(shards.ids_of(number)) for number in mine)
    before = len(shards.ids) - share if ranks.world == 1 else 0  # an earlier run's work: no part of the rate
    name = "trajectories" if ranks.world == 1 else f"trajectories, process 1 of {ranks.world}"
    with tqdm(
        total=before + share,
        initial=before,
        desc=name,
        unit="text",
        smoothing=0,
        mininterval=1.0,
        disable=ranks.rank > 0,
    ) as bar:
        tokens = 0

        def advance(new_tokens: int, finished: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            if not bar.disable:
                bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
            bar.update(finished)

        for number in mine:
            shards.save(number, decode(shards.ids_of(number), shards.prompts_of(number), advance))


def check_ranks(params: Trajectories, device: Device, ranks: Ranks) -> None:
    """vLLM makes its own processes; the decoder of this project has a whole verifier on the device of each process."""
    if isinstance(params.engine, Vllm):
        if ranks.world > 1:
            raise ValueError(
                "trajectories.engine: vLLM starts its own processes; run this stage as one, without torchrun"
            )
        return
    placement = "one" if device.placement is None else device.placement.verifier
    if placement != "one":
        raise ValueError(
            f"device.placement.verifier: {placement}: engine transformers writes trajectories with a whole verifier on "
            "one device; write trajectories.engine: {name: vllm, tensor_parallel: 8, memory_share: 0.9}"
        )


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
