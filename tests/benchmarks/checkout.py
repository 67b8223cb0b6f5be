"""What a benchmark measures: a verifier in a checkout's data folder, that checkout's drafters, and prompts as ids.

A method is built with the `params.yaml` and the drafter pinned in the checkout that its verifier lies in, which need
not be the one whose code runs. Models are loaded when first asked for: a benchmark pays for what it uses.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import chdir
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from stages.common import entry, store
from stages.common.drafters import Drafter, load_drafter
from stages.common.models import Verifier, config_digest, end_ids_of, load_causal_lm, load_verifier, resolve_dtype
from stages.common.packing import pack_linears
from stages.common.params import load
from stages.common.tokenizers import Tokenizer, load_tokenizer
from stages.evaluate.contract import Method, Sampling
from stages.evaluate.engine import Engine
from stages.evaluate.parts import method_drafter, method_module
from tests.benchmarks.side_by_side import Calls

STUDENT = "student"


def natural(word: str) -> int:
    """A command line's count of at least one."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number of at least 1")
    return int(word)


def parser_of(module: str, about: str | None, *, max_new_tokens: int) -> argparse.ArgumentParser:
    """What the command lines of these benchmarks have in common. about: the module's docstring."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(about or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="<checkout>/data/<profile>/models/verifier")
    parser.add_argument("--prompts", type=Path, required=True, help="a Parquet of prompts, as stage benchmark writes")
    parser.add_argument("--count", type=int, default=0, help="the first so many prompts; 0: all")
    parser.add_argument("--max-new-tokens", type=natural, default=max_new_tokens)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "auto"], default="float32")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--out", type=Path, help="writes <out>.md and <out>.csv, e.g. reports/benchmarks/peers")
    return parser


def open_checkout(args: argparse.Namespace) -> tuple["Models", list[list[int]]]:
    """What the command line names, on as many threads as it says: the models and the prompts."""
    entry.set_threads(args.threads)
    models = Models(args.model, dtype=args.dtype)
    return models, read_prompts(args.prompts, models.tokenizer, args.count)


def run(main: Callable[[], None]) -> None:
    """A user's mistake ends a program as one line."""
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")


def read_prompts(path: Path, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """First turns as ids, in the file's order."""
    rows = store.read_parquet(path, store.PROMPTS)
    if len(rows) < max(1, count):
        raise ValueError(f"{path} holds {len(rows)} prompts; ask for --count {len(rows)} or name another file")
    return [tokenizer.encode_prompt(row["turns"][:1]) for row in rows[: count or None]]


class Models:
    """The verifier as our engine and as transformers run it, with a counter of passes each, and our drafters.

    packed: whether the linear layers of ours, and of transformers' model, lie in oneDNN's blocked layout.
    """

    def __init__(self, folder: Path, *, dtype: str, packed_ours: bool = True, packed_theirs: bool = False) -> None:
        self.folder = folder.resolve()
        self.dtype = resolve_dtype(dtype, "cpu")
        self.dtype_name = dtype
        self.packed_ours, self.packed_theirs = packed_ours, packed_theirs

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    @cached_property
    def end_ids(self) -> list[int]:
        return end_ids_of(self.folder)

    @cached_property
    def verifier(self) -> Verifier:
        return load_verifier(self.folder, dtype=self.dtype, packed=self.packed_ours)

    @cached_property
    def our_calls(self) -> Calls:
        return Calls(self.verifier.body)

    @cached_property
    def causal_lm(self) -> Any:
        """transformers' model, with the vocabulary cut to the tokenizer's ids as ours is."""
        causal_lm = load_causal_lm(self.folder, self.dtype)
        if causal_lm.config.vocab_size > self.tokenizer.size:
            causal_lm.resize_token_embeddings(self.tokenizer.size)
        if self.packed_theirs:
            pack_linears(causal_lm)
        return causal_lm.requires_grad_(False)

    @cached_property
    def their_calls(self) -> Calls:
        return Calls(self.causal_lm.model)

    @cached_property
    def student(self) -> Any:
        """Our causal student as a model of transformers, over the embedding of `causal_lm`."""
        drafter, _ = load_drafter(
            self.student_folder,
            embedding=self.causal_lm.model.embed_tokens,
            tokenizer=self.tokenizer.fingerprint(),
            config=config_digest(self.folder),
            dtype=self.dtype,
            packed=False,
        )
        return as_causal_lm(drafter, self.causal_lm)

    @property
    def student_folder(self) -> Path:
        return self.folder.parents[1] / "drafters" / STUDENT

    def method(self, name: str) -> Method:
        """A method of ours as its profile sets it."""
        return self.builder(name)()

    def builder(self, name: str) -> Callable[[], Method]:
        """Makes such methods, all over one drafter: one for each text of a batch."""
        profile, root = self.folder.parents[1].name, self.folder.parents[3]
        if root / store.verifier_folder(profile) != self.folder:
            raise ValueError(f"{self.folder}: methods are set by a checkout; name <checkout>/data/<profile>/models/...")
        device = entry.Device(name="cpu", dtype="float32", threads=0)  # only its name is read
        with chdir(root):
            module = method_module(name)
            drafter, _ = method_drafter(profile, name, self.verifier, self.tokenizer, device)
            params = load(module.Params, profile, "evaluate", name)
        return lambda: module.build(params, drafter)

    def engine(self, max_new_tokens: int) -> Engine:
        """Our loop at T_v = 0."""
        greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
        return Engine(self.verifier, greedy, max_new_tokens=max_new_tokens)


class DraftHead(nn.Module):
    """A head of draft words that answers over the whole vocabulary: what cannot be drafted scores lowest."""

    def __init__(self, drafter: Drafter, *, vocab_size: int) -> None:
        super().__init__()
        self.linear, self.vocab_size = drafter.lm_head, vocab_size
        self.d2t: Tensor
        self.register_buffer("d2t", drafter.d2t)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        lowest = torch.finfo(hidden_XD.dtype).min
        logits_XV = hidden_XD.new_full((*hidden_XD.shape[:-1], self.vocab_size), lowest)
        logits_XV[..., self.d2t] = self.linear(hidden_XD)
        return logits_XV


def as_causal_lm(drafter: Drafter, causal_lm: Any) -> Any:
    """A causal drafter as a model of transformers' own class, for those who want an assistant of that kind."""
    config = drafter.body.config
    config.vocab_size = causal_lm.config.vocab_size
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.model = drafter.body
    plain.lm_head = DraftHead(drafter, vocab_size=config.vocab_size)
    plain.set_attn_implementation("sdpa")
    plain.generation_config = type(causal_lm.generation_config).from_dict(causal_lm.generation_config.to_dict())
    return plain.eval().requires_grad_(False)
