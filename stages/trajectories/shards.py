"""Runs of the corpus in its own order, each saved when it is decoded: what a killed run goes on from.

A resumed run decodes the very batches of an undisturbed one, so the output has the same bytes.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.common import contexts, store
from stages.common.decode import Decoded
from stages.trajectories.params import Trajectories


class Shards:
    """The corpus cut into shards, and the folder that holds those that are whole."""

    def __init__(
        self, folder: Path, ids: Sequence[str], prompts: Sequence[list[int]], params: Trajectories, *, seed: int
    ) -> None:
        self.folder, self.ids, self.prompts, self.params, self.seed = folder, ids, prompts, params, seed
        self.count = -(-len(ids) // params.shard_size)

    def ids_of(self, number: int) -> Sequence[str]:
        return self.ids[self._span(number)]

    def prompts_of(self, number: int) -> Sequence[list[int]]:
        return self.prompts[self._span(number)]

    def stored(self, number: int) -> list[dict[str, Any]] | None:
        """The rows of a shard; None if it or its contexts are absent or damaged, and it must be decoded."""
        rows = finished_shard(self._file(number), self.ids_of(number))
        if rows is not None and self.params.keep_layers:
            whole = contexts.holds(
                self.folder / contexts_name(number), [row["id"] for row in rows if row["output_ids"]]
            )
            return rows if whole else None
        return rows

    def save(self, number: int, decoded: Sequence[Decoded]) -> None:
        """Write what was decoded of a shard: contexts first, for without them its rows do not count."""
        ids = self.ids_of(number)
        if self.params.keep_layers:
            kept = {name: text.context for name, text in zip(ids, decoded, strict=True) if text.context is not None}
            contexts.write_shard(self.folder / contexts_name(number), kept)
        rows = [
            {
                "id": prompt_id,
                "prompt_ids": prompt,
                "output_ids": answer.output_ids,
                "finish_reason": answer.finish_reason,
                "temperature": self.params.temperature,
                "seed": self.seed,
            }
            for prompt_id, prompt, answer in zip(ids, self.prompts_of(number), decoded, strict=True)
        ]
        store.write_parquet(self._file(number), rows, store.TRAJECTORIES, {})

    def put_together(self, contexts_folder: Path) -> list[dict[str, Any]]:
        """All rows in the corpus's order, once all shards are there; writes the folder of contexts.

        ValueError if one is not there: another process decoded it where this one cannot see it.
        """
        rows: list[dict[str, Any]] = []
        files: dict[str, str] = {}
        for number in range(self.count):
            shard = self.stored(number)
            if shard is None:
                raise ValueError(
                    f"{self._file(number)}: another process decoded this shard and it is not here; all processes need "
                    "one file system and machines of one kind"
                )
            rows += shard
            if self.params.keep_layers:
                files |= {row["id"]: contexts_name(number) for row in shard if row["output_ids"]}
        with store.replace_folder(contexts_folder) as out:
            for name in sorted(set(files.values())):
                link_or_copy(self.folder / name, out / name)
            contexts.write_index(out, self.params.keep_layers, files)
        return rows

    def _span(self, number: int) -> slice:
        start = number * self.params.shard_size
        return slice(start, start + self.params.shard_size)

    def _file(self, number: int) -> Path:
        return self.folder / f"shard_{number:05}.parquet"


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
