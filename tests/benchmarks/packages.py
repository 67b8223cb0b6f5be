"""Adapters for packages that a user might pick instead: optional imports, each through its public function.

What was read of them: flashspec 0.3.1, sequential-speculative-decoding 0.1.1 (its module is `seqspecdecod`) and dflash
0.1.0, which were also run on tiny models; and the source of `Llama` in llama-cpp-python, which was neither built nor
run. A pass is counted where the verifier's body returns, never taken from a package's own account.
"""

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.checkout import Models
from tests.benchmarks.side_by_side import Text, clocked
from tests.benchmarks.systems import NeedsStudent


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def missing(package: str, module: str) -> str | None:
    return None if find_spec(module) else f"not installed: pip install {package}"


class FlashSpec(NeedsStudent):
    """flashspec: its default strategy for one draft model, prompt lookup first and else the model, greedy.

    Its README says that it is not meant for CPUs: its fast path needs CUDA graphs.
    """

    name, version = "flashspec", installed_version("flashspec")
    note = "strategy auto with our student; meant for CUDA, says its README"

    def __init__(self, models: Models) -> None:
        self.models = models

    def available(self) -> str | None:
        return missing("flashspec", "flashspec") or self.no_student()

    @cached_property
    def engine(self) -> Any:
        from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine  # pyright: ignore
        from flashspec.engine import HuggingFaceDrafter, TargetModel  # pyright: ignore

        cpu, dtype, models = torch.device("cpu"), self.models.dtype, self.models
        target = TargetModel("verifier", cpu, dtype, model=models.causal_lm)
        drafter = HuggingFaceDrafter("student", cpu, dtype, temperature=0.0, model=models.student)
        config = FlashSpecConfig(
            device="cpu", compile=False, eos_token_ids=tuple(models.end_ids), sampling=SamplingConfig(temperature=0.0)
        )
        return SpeculativeEngine(config, [drafter], target)

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Text:
        def decode() -> list[int]:
            result = self.engine.generate(torch.tensor([list(ids)]), max_new_tokens=max_new_tokens)
            return result.output_ids[0, : result.n_tokens_generated].tolist()

        return clocked(self.models.their_calls, ids, decode, splits=False)


class Courier:
    """Stands in for a tokenizer where a function takes text and we have ids: hands them over, keeps what comes back.

    It can only what `seqspecdecod.speculative_generate` asks of a tokenizer.
    """

    unk_token_id = -1

    def __init__(self, ids: Sequence[int], end_id: int) -> None:
        self.eos_token_id = end_id
        self.input_ids = torch.tensor([list(ids)])
        self.output_ids: list[int] = []

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        return ""

    def __call__(self, *_: Any, **__: Any) -> "Courier":
        return self

    def convert_tokens_to_ids(self, _: str) -> int:
        return self.unk_token_id

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        self.output_ids += ids
        return ""


class Sequential(NeedsStudent):
    """sequential-speculative-decoding: chains of five tokens, rule `standard`. It has no cache: passes read all again.

    It knows one end token, the tokenizer's, and drops it; it may run past the limit. The adapter puts the end token
    back and cuts at the limit, so that texts and counts compare.
    """

    name, version = "sequential-speculative-decoding", installed_version("sequential-speculative-decoding")
    note = "method standard, gamma 5, our student; no key-value cache, by its design"

    def __init__(self, models: Models) -> None:
        self.models = models

    def available(self) -> str | None:
        return missing(self.name, "seqspecdecod") or self.no_student()

    @cached_property
    def end_id(self) -> int:
        from transformers import AutoTokenizer

        return int(AutoTokenizer.from_pretrained(self.models.folder).eos_token_id)

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Text:
        from seqspecdecod import speculative_generate  # pyright: ignore

        target, student, courier = self.models.causal_lm, self.models.student, Courier(ids, self.end_id)

        def decode() -> list[int]:
            speculative_generate(
                *(student, target, courier, ""),
                max_new_tokens=max_new_tokens,
                gamma=5,
                draft_temperature=0.0,
                target_temperature=0.0,
                method="standard",
            )
            whole = len(courier.output_ids) >= max_new_tokens
            return courier.output_ids[:max_new_tokens] if whole else [*courier.output_ids, self.end_id]

        return clocked(self.models.their_calls, ids, decode, splits=False)


class DFlash:
    """dflash: block drafters fed with the verifier's states, trained by its authors for a list of large models.

    There is none for a model of ours, and our own fed drafter is another network (a left shift, the verifier's kind of
    layers, a trained mask embedding), so this runs only where a folder with one is named.
    """

    name, version = "dflash", installed_version("dflash")
    note = "its own draft model; its command line wants CUDA, its function does not"

    def __init__(self, models: Models, draft: Path | None) -> None:
        self.models, self.draft = models, draft

    def available(self) -> str | None:
        if self.draft is None:
            return (
                "publishes no draft model for this verifier (only for Qwen3, Llama-3.1-8B and larger); --dflash-draft"
            )
        return missing("dflash", "dflash")

    @cached_property
    def model(self) -> Any:
        from dflash import DFlashDraftModel  # pyright: ignore

        assert self.draft is not None
        draft = DFlashDraftModel.from_pretrained(self.draft, attn_implementation="sdpa", dtype=self.models.dtype)
        return draft.eval().requires_grad_(False)

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Text:
        from dflash.model import dflash_generate  # pyright: ignore

        draft, target, end_ids = self.model, self.models.causal_lm, self.models.end_ids

        def decode() -> list[int]:
            ids_1T = torch.tensor([list(ids)])
            texts: Tensor = dflash_generate(draft, target, ids_1T, max_new_tokens, end_ids or None, 0.0)
            return texts[0, len(ids) :].tolist()

        return clocked(self.models.their_calls, ids, decode, splits=True)


class LlamaCpp:
    """llama.cpp on the GGUF that the verifier was unpacked from: 4-bit weights and an engine in C++, no draft.

    Its weights are those of ours, its arithmetic is not (activations are rounded to 8 bits), so texts may differ. A
    pass is a call of `eval`.
    """

    name, version = "llama.cpp", installed_version("llama-cpp-python")
    note = "another engine on 4-bit weights: not the same arithmetic, no draft"

    def __init__(self, models: Models, gguf: Path | None, *, threads: int, context: int) -> None:
        self.models, self.gguf, self.threads, self.context = models, gguf, threads, context
        self.passes: list[float] = []  # when each returned

    def available(self) -> str | None:
        if reason := missing("llama-cpp-python", "llama_cpp"):
            return reason
        return None if self.gguf is not None else "no --gguf"

    @cached_property
    def llama(self) -> Any:
        from llama_cpp import Llama  # pyright: ignore

        cores = {"n_threads": self.threads, "n_threads_batch": self.threads}
        return self.counting(Llama(model_path=str(self.gguf), n_ctx=self.context, verbose=False, **cores))

    def counting(self, llama: Any) -> Any:
        """The same object, whose `eval` also notes when it returned."""
        evaluate = llama.eval

        def counted(tokens: Sequence[int]) -> None:
            evaluate(tokens)
            self.passes.append(perf_counter())

        llama.eval = counted
        return llama

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Text:
        llama, output_ids = self.llama, list[int]()
        llama.reset()  # or a prompt that starts as the last one did would find itself half read
        self.passes.clear()
        start = perf_counter()
        for token in llama.generate(list(ids), temp=0.0, repeat_penalty=1.0):
            output_ids.append(int(token))
            if token in self.models.end_ids or len(output_ids) >= max_new_tokens:
                break
        seconds = perf_counter() - start
        return Text(output_ids, seconds, self.passes[0] - start, len(self.passes))
