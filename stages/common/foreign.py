"""A published diffusion drafter, read into transformers' own classes: no code of the checkpoint is run.

    layout   its weights are   names in the checkpoint
    qwen2    Qwen2's           model.layers.., model.embed_tokens, lm_head            (Dream-7B, DiffuCoder-7B)
    llama    LLaMA's           denoise_model.layers.., embed_tokens, lm_head          (DiffuLLaMA-7B), or as above

The folder is data/<profile>/models/drafter; what its files do not say stands beside it in `layout.json`. Names must be
those of the architecture, one for one. Shards are read tensor by tensor, straight into the wanted number format.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer
from transformers import PreTrainedTokenizerFast as FastTokenizer

from stages.common import store
from stages.common.hub import local_folder
from stages.common.translate import Tokens, tokens_of

Architecture = Literal["qwen2", "llama"]
NEEDED: dict[str, tuple[str, ...]] = {
    "llama": (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("max_position_embeddings", "rms_norm_eps"),
    ),
    "qwen2": ("num_key_value_heads", "rope_theta"),  # beside llama's: transformers would put other numbers there
}
OPTIONAL = (
    *("hidden_act", "tie_word_embeddings", "rope_scaling", "rope_parameters", "rope_theta", "num_key_value_heads"),
    *("head_dim", "attention_bias", "mlp_bias"),
)
REFUSED = ("use_sliding_window", "use_mrope")  # a mask or positions that a plain window does not have
PREFIXES = {"denoise_model.": "model.", "embed_tokens.": "model.embed_tokens."}  # DiffuLLaMA's
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LAYOUT = "layout.json"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a checkpoint is, beside its files."""

    layout: Architecture
    mask_token_id: int
    shift: Literal["left"]  # row i speaks for token i + 1


def write_layout(folder: Path, layout: Layout) -> None:
    """Beside a drafter's folder."""
    store.write_json(folder.with_name(LAYOUT), vars(layout))


def read_layout(folder: Path) -> Layout:
    return Layout(**store.read_json(folder.with_name(LAYOUT)))


def digest(folder: Path) -> str:
    """Of the tracked folder (of a hub's model: its manifest) and its layout."""
    parts = (store.sha256_folder(folder), store.sha256_file(folder.with_name(LAYOUT)))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def base_of(folder: Path, base: str) -> Path:
    """data/<profile>/<base>, from the folder of a drafter somewhere under data/<profile>."""
    for parent in folder.resolve().parents:
        if (parent / base).is_dir():
            return parent / base
    raise ValueError(f"{folder}: this drafter stands on {base}, which no folder above it has; run dvc repro models")


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration as transformers' own class wants it. Raises ValueError naming the field it cannot take."""
    architecture = read_layout(folder).layout
    path = local_folder(folder) / "config.json"
    said = store.read_json(path)
    needed = (*NEEDED["llama"], *(NEEDED["qwen2"] if architecture == "qwen2" else ()))
    if missing := [name for name in needed if said.get(name) is None and not (name == "rope_theta" and _rope(said))]:
        raise ValueError(f"{path}: lacks {', '.join(missing)}, which layout {architecture} needs")
    if strange := [name for name in REFUSED if said.get(name)]:
        raise ValueError(
            f"{path}: {strange[0]} is {said[strange[0]]}: such attention is not built; use another drafter"
        )
    found = {name: said[name] for name in (*needed, *OPTIONAL) if said.get(name) is not None}
    wanted = {"tie_word_embeddings": bool(said.get("tie_word_embeddings", False))}
    return {**found, **wanted, "model_type": architecture}


def _rope(said: dict[str, Any]) -> bool:
    return "rope_theta" in (said.get("rope_parameters") or {})


def empty_model(config: dict[str, Any]) -> Any:
    """transformers' own model of this configuration without weights (on the meta device)."""
    config = dict(config)
    typed = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(typed, attn_implementation="sdpa")


def model_of(config: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """transformers' own model around these very tensors, frozen, in evaluation mode."""
    causal_lm = empty_model(config)
    causal_lm.load_state_dict(weights, strict=False, assign=True)
    if config.get("tie_word_embeddings"):
        causal_lm.lm_head.weight = causal_lm.model.embed_tokens.weight
    rotary = causal_lm.model.rotary_emb
    device = causal_lm.model.embed_tokens.weight.device
    causal_lm.model.rotary_emb = type(rotary)(config=causal_lm.config).to(device)
    left = [name for name, p in (*causal_lm.named_parameters(), *causal_lm.named_buffers()) if p.is_meta]
    assert not left, left
    return causal_lm.eval().requires_grad_(False)


def weights_of(folder: Path, *, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """The checkpoint's tensors under transformers' own names.

    Raises ValueError that lists names missing and names unexpected, and one where there are pickles alone.
    """
    config = config_of(folder)
    files = _files(local_folder(folder))
    wanted = {name: tuple(p.shape) for name, p in empty_model(config).state_dict().items()}
    if config["tie_word_embeddings"]:
        wanted.pop("lm_head.weight")
    found = {own: name for name in files if (own := _own_name(name, tied=config["tie_word_embeddings"]))}
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(found[name] for name in set(found) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"{folder}: these are not the weights of a {config['model_type']}: missing {missing or 'nothing'}, "
            f"unexpected {unexpected or 'nothing'}; correct models.drafter.layout, or use another checkpoint"
        )
    read = dict(_read(files, {name: own for own, name in found.items()}, wanted, dtype, device))
    if lost := sorted(set(wanted) - set(read)):
        raise ValueError(
            f"{folder}: {INDEX} names {', '.join(lost)}, which the files do not hold; run dvc repro models"
        )
    return read


def _own_name(name: str, *, tied: bool) -> str | None:
    """transformers' name of a tensor; None for what is no weight: frequencies that old versions stored, a tied head."""
    if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
        return None
    for theirs, ours in PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor, by the checkpoint's own names."""
    if (folder / INDEX).exists():
        return {name: folder / file for name, file in store.read_json(folder / INDEX)["weight_map"].items()}
    path = folder / SINGLE
    if not path.exists():
        if pickles := sorted(file.name for file in folder.glob("*.bin")):
            raise ValueError(
                f"{folder}: weights only in {', '.join(pickles)}: a pickle runs code as it is read, so it is not; "
                "use a revision with safetensors, or convert it"
            )
        raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX} is here; run dvc repro models")
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _read(
    files: dict[str, Path], names: dict[str, str], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str
) -> Iterator[tuple[str, Tensor]]:
    """Tensor by tensor, each shard opened once."""
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if (own := names.get(name)) is None:
                    continue
                tensor = file.get_tensor(name)
                if tuple(tensor.shape) != shapes[own]:
                    raise ValueError(f"{path}: {name} is {tuple(tensor.shape)}, config.json makes it {shapes[own]}")
                yield own, tensor.to(dtype)


_HELD: dict[tuple[str, torch.dtype, str], dict[str, Tensor]] = {}


def shared_weights(folder: Path, *, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """As `weights_of`, one copy for every drafter that stands on this base. Never train these."""
    key = (digest(folder), dtype, device)
    if key not in _HELD:
        _HELD.clear()  # another base, or another form of it: one is held at a time
        _HELD[key] = weights_of(folder, dtype=dtype, device=device)
    return _HELD[key]


def drafter_tokens(folder: Path) -> Tokens:
    """What the drafter's own tokenizer writes. No code of the checkpoint is run, whatever class its files name."""
    local = local_folder(folder)
    try:
        if (local / "tokenizer.json").exists():
            return tokens_of(FastTokenizer.from_pretrained(local))
        if (local / "vocab.json").exists() and (local / "merges.txt").exists():  # Dream's and DiffuCoder's
            return tokens_of(Qwen2Tokenizer.from_pretrained(local))
        return tokens_of(AutoTokenizer.from_pretrained(local, trust_remote_code=False))
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder}: transformers cannot read the drafter's tokenizer: {reason}") from None


def verifier_tokens(folder: Path) -> Tokens:
    return tokens_of(AutoTokenizer.from_pretrained(local_folder(folder)))


def verifier_rows(folder: Path) -> int:
    """Of the verifier's embedding, which may be more than its tokenizer has ids."""
    return AutoConfig.from_pretrained(local_folder(folder)).get_text_config().vocab_size
