"""What a cell is put together from: the method's module, the models of a profile, the pinned drafter, the prompts."""

import importlib
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from stages.common import entry, spread, store
from stages.common.drafters import Drafter, DrafterCard, load_drafter
from stages.common.eagle import Eagle3Head, EagleHead
from stages.common.fed import FedDrafter
from stages.common.heads import Head, HeadCard, load_head
from stages.common.medusa import HydraHead, MedusaHead
from stages.common.models import Verifier, config_digest, load_verifier, resolve_dtype
from stages.common.provenance import prompt_sha256
from stages.common.tokenizers import Tokenizer, load_tokenizer
from stages.evaluate.engine import Engine
from stages.evaluate.harness import Behind, Prompt

VANILLA = "vanilla"
WINDOW = "masked_window"  # the kind of drafter that a method wants unless its module says another `KIND`
# By the kind of their drafter.json; any other kind is a Drafter.
HEADS: dict[str, type[Head]] = {head.kind: head for head in (EagleHead, Eagle3Head, MedusaHead, HydraHead, FedDrafter)}


def method_module(method: str) -> ModuleType:
    """The method's module, by name."""
    name = f"stages.evaluate.methods.{method}"
    if find_spec(name) is None:
        folder = Path(__file__).parent / "methods"
        known = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
        raise ValueError(f"params.yaml: methods: no method {method!r}; there are {', '.join(known)}")
    return importlib.import_module(name)


def load_models(profile: str, device: entry.Device) -> tuple[Verifier, Tokenizer]:
    folder = store.verifier_folder(profile)
    dtype = resolve_dtype(device.dtype, device.name)
    verifier = load_verifier(folder, dtype=dtype, device=device.name, placement=device.placement)
    return verifier, load_tokenizer(folder)


def method_drafter(
    profile: str, method: str, verifier: Verifier, tokenizer: Tokenizer, device: entry.Device
) -> tuple[Drafter | Head | None, DrafterCard | HeadCard | None]:
    """The drafter that the method's manifest pins, checked against its hash; none for a method without one."""
    if method == VANILLA:
        return None, None
    path = store.manifest_file(profile, method)
    manifest = store.read_json(path)
    if manifest["drafter"] is None:
        return None, None
    folder = Path(manifest["folder"])
    if not folder.exists() or store.sha256_folder(folder) != manifest["sha256"]:
        raise ValueError(f"{folder}: not the drafter that {path} pins; run dvc repro drafter")
    kind, wanted = store.read_json(folder / "drafter.json")["kind"], getattr(method_module(method), "KIND", WINDOW)
    if kind != wanted:
        raise ValueError(
            f"params.yaml: {profile}.evaluate.{method}.drafter: {manifest['drafter']!r} is of kind {kind!r}; "
            f"name a drafter of kind {wanted!r}"
        )
    return load_pinned(profile, folder, kind, verifier, tokenizer, device)


def load_pinned(
    profile: str, folder: Path, kind: str, verifier: Verifier, tokenizer: Tokenizer, device: entry.Device
) -> tuple[Drafter | Head, DrafterCard | HeadCard]:
    """The drafter of a folder. A head stays with the verifier, whose modules it uses; others go where params say."""
    fingerprint, config = tokenizer.fingerprint(), config_digest(store.verifier_folder(profile))
    if kind in HEADS:
        return load_head(folder, HEADS[kind], verifier, tokenizer=fingerprint, config=config)
    apart = drafter_device(device)
    drafter, card = load_drafter(
        folder,
        embedding=verifier.body.embed_tokens if apart is None else spread.copy_of(verifier.body.embed_tokens),
        tokenizer=fingerprint,
        config=config,
        dtype=verifier.dtype,
        device=str(verifier.device if apart is None else apart),
    )
    if drafter.prefix == "verifier" and device.placement is not None and device.placement.verifier == "tp":
        raise ValueError(
            f"{folder}: this drafter reads the verifier's keys, of which each rank of a tensor-parallel verifier has "
            "some heads alone; train one with adapt.prefix: own, or write device.placement.verifier: auto"
        )
    return drafter, card


def drafter_device(device: entry.Device) -> torch.device | None:
    """Where drafters live, if not beside the verifier."""
    name = device.placement.drafter if device.placement is not None else ""
    return torch.device(name) if name else None


def transfers(engine: Engine) -> dict[str, Any]:
    """What was moved between the verifier's devices and the drafter's, for a cell's provenance; nothing without any."""
    return {"moved_bytes": engine.moved_bytes} if engine.drafter_device is not None else {}


def read_prompts(profile: str, benchmark: str, tokenizer: Tokenizer) -> list[Prompt]:
    """The benchmark's prompts as ids, which must be the ids it was checked with; of a chat every turn it asks for."""
    path = store.prompts_file(profile, benchmark)
    found = []
    for row in store.read_parquet(path, store.PROMPTS):
        turns = row["turns"]
        ids = [tokenizer.encode_prompt([turn]) for turn in turns]
        if prompt_sha256([token for turn in ids for token in turn]) != row["prompt_sha256"]:
            raise ValueError(f"{path}: prompt {row['id']} renders to other ids than when it was made; run dvc repro")
        if len(turns) == 1:
            found.append(Prompt(id=row["id"], split=row["split"], ids=tuple(ids[0])))
            continue
        first = row["id"].rpartition("#")[0]
        before = (first, *(f"{first}#{turn}" for turn in range(2, len(turns))))
        behind = Behind(answers=before, render=partial(chat_ids, tokenizer, turns))
        found.append(Prompt(id=row["id"], split=row["split"], ids=(), behind=behind))
    return found


def chat_ids(tokenizer: Tokenizer, turns: Sequence[str], answers: Sequence[Sequence[int]]) -> list[int]:
    """The user's turns with the answers' texts between them, up to where the verifier speaks again."""
    chat = [turns[0]]
    for answer, turn in zip(answers, turns[1:], strict=True):
        chat += [tokenizer.decode(answer), turn]
    return tokenizer.encode_prompt(chat)
