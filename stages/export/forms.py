"""What an exported folder holds, by the drafter's kind, and how it is read back.

    masked_window  as transformers names a causal LM of its body's type: `model.embed_tokens.weight` with the mask's row
                   behind the words', `model.layers..`, `model.norm.weight`; `lm_head.weight` over the draft words only,
                   and `d2t`, the word's id of each. AutoModel loads the body.
    causal         the same; over the whole vocabulary it is an ordinary causal LM, its head in the order of ids
    medusa         vLLM's names and config: `blocks.<j>.layers.0.weight`, `lm_heads.<j>.weight`, `token_map`
    others         their own names: heads over the verifier's states, which share its embedding (and EAGLE its head)

`drafter.json` is the sidecar the pipeline wrote. What is measured of an export is measured of this folder alone, over
the verifier it drafts for.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.common import lora, store
from stages.common.drafters import Drafter, load_drafter, read_card
from stages.common.heads import Head, load_head, read_head_card
from stages.common.hub import local_folder
from stages.common.models import Verifier, config_digest, empty_body, load_causal_lm
from stages.common.packing import can_pack, pack_linears
from stages.common.tokenizers import Tokenizer
from stages.evaluate.parts import HEADS

WEIGHTS = "model.safetensors"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt")


class Form(NamedTuple):
    """For the card: how the folder is loaded, and by which servers."""

    loads: str
    servers: str


ORDINARY = Form(
    "An ordinary causal LM: `AutoModelForCausalLM.from_pretrained` loads it.",
    'vLLM (`--speculative-config \'{"method": "draft_model", "model": ".."}\'`), SGLang (`--speculative-algorithm '
    "STANDALONE`) and transformers' assisted generation load it beside its verifier.",
)
PART_OF_VOCABULARY = Form(
    "`AutoModel.from_pretrained` loads the body with its embedding; `lm_head.weight` scores the draft words, whose ids "
    "are `d2t`.",
    "No server loads it: its head speaks a part of the vocabulary. Train it with `draft_vocab` as large as the "
    "verifier's vocabulary, and the export is a causal LM that servers load.",
)
MASKED = {
    "own": Form(
        "`AutoModel.from_pretrained` loads the body with its embedding, whose last row is the mask's; `lm_head.weight` "
        "scores the draft words, whose ids are `d2t`. Prefix rows are causal, the window's rows see one another, and "
        "row i speaks for token i + 1.",
        "No server loads it today: none drafts a masked window over a causal prefix of the drafter's own.",
    ),
    "verifier": Form(
        "`AutoModel.from_pretrained` loads the body with its embedding, whose last row is the mask's; `lm_head.weight` "
        "scores the draft words, whose ids are `d2t`. Its layers attend to the keys and values that the verifier "
        "cached at the layers named `layers` in drafter.json, so it drafts beside that verifier alone.",
        "No server loads it today: none lends a drafter the verifier's cache.",
    ),
}
MASKED["bidirectional"] = Form(
    MASKED["own"].loads.replace(
        "Prefix rows are causal, the window's rows see one another", "All rows see one another"
    ),
    "No server loads it as a drafter today.",
)
HEAD_FORMS = {
    "medusa": Form(
        "Medusa's heads in vLLM's names.",
        'vLLM loads it beside its verifier: `--speculative-config \'{"method": "medusa", "model": "..", '
        '"num_speculative_tokens": <heads>}\'`. It drafts one chain from it, not a tree. SGLang has no Medusa.',
    ),
    "hydra": Form("This project's own names.", "No server loads it: none has Hydra's heads."),
    "eagle": Form(
        "This project's own names.",
        "No server loads it: vLLM's and SGLang's EAGLE has no norm before its layer and none behind it; this head has "
        "both, and feeds back the state behind the last one.",
    ),
    "eagle3": Form(
        "This project's own names.",
        "No server loads it: vLLM's and SGLang's EAGLE-3 attends over word and state side by side (twice the width), "
        "with the state as residual; here `fc` joins them first, and an ordinary layer follows.",
    ),
    "fed": Form(
        "This project's own names.",
        "No server loads it: DFlash, which vLLM and SGLang load, makes keys from the fused states without the layer's "
        "input norm and normalises queries and keys; here each state is scaled first, and the layers are of the "
        "verifier's kind.",
    ),
}


class Maker:
    """One drafter of a profile: as it was trained, written as an export, and read back from there."""

    def __init__(
        self, profile: str, source: Path, verifier: Verifier, tokenizer: Tokenizer, *, dtype: torch.dtype
    ) -> None:
        self.source, self.verifier, self.dtype = source, verifier, dtype
        self.model_folder = store.verifier_folder(profile)
        self.kind: str = store.read_json(source / "drafter.json")["kind"]
        self.checks = {"tokenizer": tokenizer.fingerprint(), "config": config_digest(self.model_folder)}

    def original(self, *, packed: bool = True) -> Any:
        """The drafter as the pipeline loads it."""
        if self.kind in HEADS:
            return load_head(self.source, HEADS[self.kind], self.verifier, packed=packed, **self.checks)[0]
        drafter, card = load_drafter(
            self.source,
            embedding=self.verifier.body.embed_tokens,
            dtype=self.dtype if packed else torch.float32,
            device=self.verifier.device.type if packed else "cpu",
            packed=packed,
            **self.checks,
        )
        if base := getattr(card, "base", ""):
            raise ValueError(
                f"{self.source}: a drafter over {base} is published as that model and what was trained beside "
                "it; export of these is not built yet"
            )
        return drafter

    def write(self, out: Path, *, merge: bool) -> Form:
        """Fill an empty folder. Weights are written as they were trained."""
        shutil.copy2(self.source / "drafter.json", out / "drafter.json")
        for pattern in TOKENIZER:
            for file in sorted(local_folder(self.model_folder).glob(pattern)):
                shutil.copyfile(file, out / file.name)
        if self.kind == "medusa":
            self._write_medusa(out)
        if self.kind in HEADS:
            if self.kind != "medusa":
                shutil.copyfile(self.source / WEIGHTS, out / WEIGHTS)
            return HEAD_FORMS[self.kind]
        drafter = self.original(packed=False)
        if merge:
            lora.merge(drafter)
        return self._write_language_model(out, drafter)

    def reload(self, folder: Path) -> Any:
        """The drafter of an exported folder, ready to draft."""
        if self.kind in HEADS:
            return self._reload_head(folder)
        return self._reload_language_model(folder)

    # Drafters that are language models ------------------------------------------------------------------------

    def _write_language_model(self, out: Path, drafter: Drafter) -> Form:
        words_VD = load_causal_lm(self.model_folder, torch.float32).get_input_embeddings().weight
        state = {
            name.replace(".base_layer", "").replace("body.", "model.", 1): value.contiguous()
            for name, value in drafter.state_dict().items()
            if not name.startswith("body.embed_tokens") and ".lora_" not in name
        }
        mask_D, head_VD, config = state.pop("mask_embedding"), state["lm_head.weight"], drafter.body.config.to_dict()
        config |= {"tie_word_embeddings": False, "architectures": [type(drafter.body).__name__]}
        whole = self.kind == "causal" and len(drafter.d2t) == drafter.vocab_size
        if whole:
            full_VD = self._verifier_head()
            full_VD[drafter.d2t] = head_VD
            state |= {"lm_head.weight": full_VD, "model.embed_tokens.weight": words_VD}
            config |= {"architectures": [type(drafter.body).__name__.removesuffix("Model") + "ForCausalLM"]}
        else:
            rows_VD = torch.cat([words_VD[: drafter.vocab_size], mask_D[None]])
            state |= {"model.embed_tokens.weight": rows_VD, "d2t": drafter.d2t}
        config["vocab_size"] = len(state["model.embed_tokens.weight"])
        save_file({name: value.contiguous() for name, value in state.items()}, out / WEIGHTS, {"format": "pt"})
        (out / "config.json").write_text(json.dumps(_plain(config), indent=2, sort_keys=True) + "\n")
        if lora.attached(drafter):
            lora.save(out, drafter)
        if self.kind == "causal":
            return ORDINARY if whole else PART_OF_VOCABULARY
        return MASKED[drafter.prefix]

    def _verifier_head(self) -> Tensor:
        """A copy of the verifier's head: rows beyond the tokenizer's ids stay its own, which are never likely."""
        return load_causal_lm(self.model_folder, torch.float32).get_output_embeddings().weight.detach().clone()

    def _reload_language_model(self, folder: Path) -> Drafter:
        card, state = read_card(folder), load_file(folder / WEIGHTS)
        config = json.loads((folder / "config.json").read_text())
        words_VD = state.pop("model.embed_tokens.weight")
        d2t = state.pop("d2t", None)
        if d2t is None:
            d2t, mask_D = torch.arange(card.vocab_size), torch.zeros(words_VD.shape[1])
            state["lm_head.weight"] = state["lm_head.weight"][: card.vocab_size]
        else:
            words_VD, mask_D = words_VD[:-1], words_VD[-1]
        embedding = nn.Embedding.from_pretrained(words_VD.to(self.dtype))
        body = empty_body(config | {"vocab_size": len(words_VD)}, embedding)
        drafter = Drafter(body, d2t=d2t, vocab_size=card.vocab_size, layers=card.layers, prefix=card.prefix)
        state = {name.replace("model.", "body.", 1): value for name, value in state.items()}
        missing, unexpected = drafter.load_state_dict(state | {"mask_embedding": mask_D}, strict=False)
        assert not unexpected, unexpected
        assert all(name.startswith("body.embed_tokens") for name in missing), missing
        if lora.saved(folder):
            lora.load(drafter, folder)
            lora.merge(drafter)
        device = self.verifier.device.type
        drafter = drafter.to(device=device, dtype=self.dtype).eval().requires_grad_(False)
        if can_pack(device, self.dtype):
            pack_linears(drafter)
        return drafter

    # Heads over the verifier's states ---------------------------------------------------------------------------

    def _write_medusa(self, out: Path) -> None:
        """vLLM's Medusa: one residual block and one head for each place, over the words of `token_map`."""
        card, state = read_head_card(self.source), load_file(self.source / WEIGHTS)
        config = self.verifier.body.config
        named = {"token_map": state["d2t"]}
        for j, weight_VD in enumerate(state["lm_head.weight"]):
            named[f"lm_heads.{j}.weight"] = weight_VD.contiguous()
            named[f"blocks.{j}.layers.0.weight"] = state[f"residuals.{j}.weight"]
        save_file(named, out / WEIGHTS, {"format": "pt"})
        settings = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": card.draft_vocab_size,
            "num_heads": card.settings["heads"],
            "num_hidden_layers": 1,
            "medusa_fc_bias": False,
            "original_lm_head": False,
        }
        store.write_json(out / "config.json", settings)

    def _reload_head(self, folder: Path) -> Head:
        card, state = read_head_card(folder), load_file(folder / WEIGHTS)
        if self.kind == "medusa":
            heads = range(card.settings["heads"])
            state = {
                "d2t": state["token_map"],
                "lm_head.weight": torch.stack([state[f"lm_heads.{j}.weight"] for j in heads]),
            } | {f"residuals.{j}.weight": state[f"blocks.{j}.layers.0.weight"] for j in heads}
        d2t = state.pop("d2t")
        head = HEADS[self.kind].build(self.verifier, reads=card.target_layer_ids, d2t=d2t, **card.settings)
        head.load_state_dict(state)
        head = head.to(device=self.verifier.device, dtype=self.dtype).eval().requires_grad_(False)
        if can_pack(self.verifier.device.type, self.dtype):
            pack_linears(head)
        return head


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Without what only says how and by whom it was loaded."""
    return {name: value for name, value in config.items() if not name.startswith("_") and value is not None}
