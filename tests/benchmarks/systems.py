"""Adapters: our engine and transformers' three ways to generate, behind one face (side_by_side.System).

Each calls a public function on ids and does nothing else that takes time. A pass is counted where the verifier's body
returns. What drafts with a model of its own drafts with our causal student: the same weights for all.
"""

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch

from tests.benchmarks.checkout import Models
from tests.benchmarks.side_by_side import Text, clocked


class Ours:
    """A method of our engine, vanilla among them."""

    def __init__(self, models: Models, method: str, *, name: str = "", note: str = "") -> None:
        self.models, self.method_name = models, method
        self.name = name or f"ours: {method}"
        self.version = ""
        self.note = note or ("packed linear layers" if models.packed_ours else "plain linear layers")

    def available(self) -> str | None:
        return None

    @cached_property
    def method(self) -> Any:
        return self.models.method(self.method_name)

    @cached_property
    def engine(self) -> Any:
        return self.models.engine(0)

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Text:
        self.engine.max_new_tokens = max_new_tokens
        prefill_s = 0.0

        def decode() -> list[int]:
            nonlocal prefill_s
            text = self.engine.decode(ids, self.method, prompt_id="peers")  # at T_v = 0 no coin depends on it
            prefill_s = text.prefill_s
            return text.output_ids

        return clocked(self.models.our_calls, ids, decode, splits=False)._replace(prefill_seconds=prefill_s)


class Generate:
    """transformers' `generate`, greedy."""

    def __init__(self, models: Models, *, name: str = "transformers generate", note: str = "") -> None:
        self.models, self.name = models, name
        self.version = version("transformers")
        self.note = note or "as loaded, plain linear layers"

    splits = True  # whether the first pass reads the prompt and nothing else

    def available(self) -> str | None:
        return None

    def options(self) -> dict[str, Any]:
        return {}

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Text:
        causal_lm, end_ids, options = self.models.causal_lm, self.models.end_ids, self.options()

        def decode() -> list[int]:
            ids_1T = torch.tensor([list(ids)])
            texts = causal_lm.generate(
                input_ids=ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=end_ids or None,
                pad_token_id=min(end_ids, default=0),
                **options,
            )
            return texts[0, len(ids) :].tolist()

        return clocked(self.models.their_calls, ids, decode, splits=self.splits)


class PromptLookup(Generate):
    """`generate` that drafts what followed the text's last words before."""

    splits = False

    def __init__(self, models: Models, *, tokens: int) -> None:
        super().__init__(models, name="transformers prompt lookup", note=f"prompt_lookup_num_tokens={tokens}")
        self.tokens = tokens

    def options(self) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.tokens}


class NeedsStudent:
    """A system that drafts with our causal student."""

    models: Models

    def no_student(self) -> str | None:
        folder = self.models.student_folder
        return None if (folder / "drafter.json").exists() else f"no draft model: {folder} is missing; run dvc repro"


class Assisted(NeedsStudent, Generate):
    """`generate` with an assistant: our causal student, in transformers' own class."""

    splits = False

    def __init__(self, models: Models) -> None:
        note = "assistant: our student; transformers' own settings of draft length and confidence"
        super().__init__(models, name="transformers assisted", note=note)

    def available(self) -> str | None:
        return self.no_student()

    def options(self) -> dict[str, Any]:
        return {"assistant_model": self.models.student}
