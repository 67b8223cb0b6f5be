"""What every point of a sweep is measured with: one verifier, the pinned prompts, and a drafter at a time."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.common import entry, provenance, spread, store, studies
from stages.common.drafters import Drafter, DrafterCard
from stages.common.heads import Head, HeadCard
from stages.evaluate import harness
from stages.evaluate.contract import Sampling
from stages.evaluate.engine import Engine
from stages.evaluate.harness import Prompt, Reference, Shared
from stages.evaluate.parts import drafter_device, load_models, load_pinned, method_module, read_prompts, transfers

Loaded = tuple[Drafter | Head | None, DrafterCard | HeadCard | None]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of data/<profile>/grids/<sweep>.json; `reference` is the vanilla cell it is compared with, if any."""

    name: str
    index: int
    method: str
    x: str | float
    series: str
    settings: dict[str, Any]
    params: Any  # of the method
    shared: Shared
    drafter: dict[str, str] | None
    reference: dict[str, str] | None


@dataclass(frozen=True, kw_only=True)
class Grid:
    benchmark: str
    split: str
    x_name: str
    prompts: dict[str, str]  # hash of the ids by prompt, in order
    points: list[Point]


def read_grid(profile: str, name: str) -> Grid:
    """The grid with its settings as the methods want them."""
    found = store.read_json(studies.grid_file(profile, name))
    points = []
    for fields in found["points"]:
        params = method_module(fields["method"]).Params(**{k: _frozen(v) for k, v in fields["params"].items()})
        points.append(Point(**{**fields, "params": params, "shared": Shared(**fields["shared"])}))
    prompts = {prompt["id"]: prompt["sha256"] for prompt in found["prompts"]}
    places = {key: found[key] for key in ("benchmark", "split", "x_name")}
    return Grid(**places, prompts=prompts, points=points)


class Bench:
    """Measures; holds the drafter it used last, since neighbouring points often share it."""

    def __init__(self, profile: str, grid: Grid, device: entry.Device, *, seed: int) -> None:
        self.profile, self.benchmark, self.device, self.seed = profile, grid.benchmark, device, seed
        self.verifier, self.tokenizer = load_models(profile, device)
        self.stamp = provenance.stamp(device=device.name, dtype=self.verifier.dtype) | spread.stamp(device.placement)
        self.prompts = self._pinned(grid)
        self._held: tuple[str, Loaded] = ("", (None, None))

    def texts(self, *settings: Shared) -> int:
        """How many texts these settings ask for."""
        return sum(len(self.prompts) * shared.repeats for shared in settings)

    def measure(
        self,
        method: str,
        params: Any,
        shared: Shared,
        pin: Mapping[str, str] | None,
        reference: Reference | None,
        progress: Any,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(rows of a cell, the measured part of its provenance)."""
        module = method_module(method)
        drafter, card = self._drafter(pin)
        s = shared
        coins = Sampling(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, seed=self.seed)
        place = drafter_device(self.device)
        engine = Engine(self.verifier, coins, max_new_tokens=s.max_new_tokens, drafter_device=place)
        rows, rounding = harness.measure(
            engine,
            module.build(params, drafter),
            self.prompts,
            shared,
            seed=self.seed,
            reference=reference,
            covered=None if drafter is None else drafter.t2d.cpu() >= 0,
            comparable=harness.greedy_or_match(shared, module.RULE),
            progress=progress,
        )
        for row in rows:
            row |= {"benchmark": self.benchmark, "method": method, "text": self.tokenizer.decode(row["output_ids"])}
            row |= {"answer": None, "correct": None}
        facts = {
            "stamp": self.stamp,
            "drafter": None if card is None else {"parameters": card.parameters, "objective": card.objective},
            "params": {"shared": asdict(shared), method: asdict(params)},
            "rounding": rounding,
            "peak_rss_mb": provenance.peak_rss_mb(),
            **transfers(engine),
        }
        return rows, facts

    def _pinned(self, grid: Grid) -> list[Prompt]:
        """The grid's prompts, which must be those it saw."""
        found = {prompt.id: prompt for prompt in read_prompts(self.profile, grid.benchmark, self.tokenizer)}
        for name, digest in grid.prompts.items():
            if name not in found or provenance.prompt_sha256(found[name].ids) != digest:
                path = store.prompts_file(self.profile, grid.benchmark)
                raise ValueError(f"{path}: prompt {name} is not the one that the grid pins; run dvc repro grid")
        return [found[name] for name in grid.prompts]

    def _drafter(self, pin: Mapping[str, str] | None) -> Loaded:
        """The pinned drafter, checked against its hash; none for a method without one."""
        if pin is None:
            return None, None
        if self._held[0] != pin["sha256"]:
            folder = Path(pin["folder"])
            if not folder.exists() or store.sha256_folder(folder) != pin["sha256"]:
                raise ValueError(f"{folder}: not the drafter that the grid pins; run dvc repro grid")
            self._held = (pin["sha256"], self._load(folder))
        return self._held[1]

    def _load(self, folder: Path) -> Loaded:
        kind = store.read_json(folder / "drafter.json")["kind"]
        return load_pinned(self.profile, folder, kind, self.verifier, self.tokenizer, self.device)


def _frozen(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
