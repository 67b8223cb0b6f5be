"""A small profile on disk for tests of sweeps: a tiny verifier, prompts, drafters, its vanilla cell, params.yaml."""

import json
from pathlib import Path
from typing import Any

import torch

from stages.common import entry, params, store, studies
from stages.common.drafters import DrafterCard, save_drafter
from stages.common.models import config_digest
from stages.common.provenance import prompt_sha256
from stages.common.tiny import VOCABULARY, save_tiny
from stages.common.tokenizers import load_tokenizer
from stages.evaluate.__main__ import evaluate
from tests.stages.scripted import causal_lm, tiny_drafter

PROFILE, BENCHMARK, SPLIT = "p", "sums", "test"
DEVICE = entry.Device(name="cpu", dtype="float32", threads=1)
SHARED = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "max_new_tokens": 10,
    "repeats": 1,
    "warm_up_tokens": 3,
    "yardstick_every": 5,
    "yardstick_tokens": 2,
    "excuse_multiple": 0.0,
}
EVALUATE = {
    "shared": SHARED,
    "vanilla": {"drafter": None},
    "prompt_lookup": {"drafter": None, "gamma": 3, "longest": 2, "shortest": 1},
    "specdiff": {"drafter": "adapt", "gamma": 3, "temperature": 0.0},
    "specdiff2": {"drafter": "streak", "gamma": 3, "drafts": 2, "temperature": 1.0},
    "specdiff2_tree": {"drafter": "streak", "gamma": 3, "nodes": 5, "width": 4, "threshold": 0.0},
    "specdiff2_steps": {"drafter": "adapt", "gamma": 3, "steps": 2, "temperature": 0.0},
    "speculative": {"drafter": "adapt", "gamma": 2, "temperature": 0.0},
}
BASE = {"benchmark": BENCHMARK, "split": SPLIT, "prompts": 2, "method": "specdiff2_tree", "x": "nodes"}


def write_params(**sweeps: dict[str, Any]) -> None:
    profile = {
        "models": {},
        "device": vars(DEVICE),
        "download": {"benchmarks": {BENCHMARK: {}, "apart": {}}},
        "evaluate": EVALUATE,
        "sweeps": {name: BASE | form for name, form in sweeps.items()},
    }
    trained = {"objectives": ["streak"], "soft_objectives": [], "baselines": [], "sizes": ["small"]}
    document = {"seed": 5, "benchmarks": [BENCHMARK], "sweeps": list(sweeps), **trained, PROFILE: profile}
    Path(params.PARAMS).write_text(json.dumps(document))  # JSON is YAML


def write_drafter(folder: Path, *, layers=(0, 1), kind="masked_window", steps=4, noise=0.0) -> None:
    drafter = tiny_drafter(layers=layers, prefix="verifier")
    g = torch.Generator().manual_seed(steps)
    for p in drafter.trained():
        p.data += noise * torch.randn(p.shape, generator=g)
    verifier = store.verifier_folder(PROFILE)
    card = DrafterCard(
        kind=kind,
        block_size=3,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix="verifier",
        layers=tuple(layers),
        verifier_tokenizer=load_tokenizer(verifier).fingerprint(),
        verifier_config=config_digest(verifier),
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        parameters=7,
        objective="streak",
        provenance={"steps": steps},
    )
    folder.mkdir(parents=True)
    save_drafter(folder, drafter, card)


def write_prompts(benchmark: str, count: int) -> None:
    tokenizer = load_tokenizer(store.verifier_folder(PROFILE))
    rows = []
    for number in range(count):
        turns = [f"{number} + {number}?"]
        digest = prompt_sha256(tokenizer.encode_prompt(turns))
        row = {"id": f"{benchmark}/{number}", "turns": turns, "reference": None, "category": "x"}
        rows.append(row | {"split": SPLIT, "prompt_sha256": digest})
    store.write_parquet(store.prompts_file(PROFILE, benchmark), rows, store.PROMPTS, {})


def prepare() -> None:
    """Everything that the stages of sweeps read, in the working directory."""
    save_tiny(store.verifier_folder(PROFILE), causal_lm(copy=5))
    write_drafter(store.drafter_folder(PROFILE, "adapt"), noise=0.02)
    write_drafter(store.drafter_folder(PROFILE, "streak"), steps=6, noise=0.01)
    write_drafter(store.checkpoint_folder(PROFILE, "streak", 2), steps=2, noise=0.01)
    write_drafter(studies.size_folder(PROFILE, "small"), layers=(1,))
    write_prompts(BENCHMARK, 3)
    write_prompts("apart", 2)
    write_params()
    evaluate(PROFILE, BENCHMARK, "vanilla", DEVICE, seed=5)
