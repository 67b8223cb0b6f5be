"""What a cell is put together from: the method's module, the models of a profile, the pinned drafter, the prompts."""

import importlib
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from stages.common import entry, store
from stages.common.drafters import Drafter, DrafterCard, load_drafter
from stages.common.eagle import Eagle3Head, EagleHead
from stages.common.fed import FedDrafter
from stages.common.heads import Head, HeadCard, load_head
from stages.common.medusa import HydraHead, MedusaHead
from stages.common.models import Tokenizer, Verifier, config_digest, load_tokenizer, load_verifier, resolve_dtype
from stages.common.provenance import prompt_sha256
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
    return load_verifier(folder, dtype=dtype, device=device.name), load_tokenizer(folder)


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
    fingerprint, config = tokenizer.fingerprint(), config_digest(store.verifier_folder(profile))
    if kind in HEADS:
        return load_head(folder, HEADS[kind], verifier, tokenizer=fingerprint, config=config)
    return load_drafter(
        folder,
        embedding=verifier.body.embed_tokens,
        tokenizer=fingerprint,
        config=config,
        dtype=verifier.dtype,
        device=device.name,
    )


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
