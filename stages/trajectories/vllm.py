"""The verifier's continuations by vLLM's offline interface: its scheduler, its cache, its sampler.

    engine = Engine(folder, params, seed=0, dtype=dtype, longest=400, words=tokenizer.size, sizes=sizes_of(folder))
    engine.decode(ids, prompts)

What vLLM would decide by itself is decided here, so that a text means the same as one of ours:

    end ids     ours alone (models.end_ids_of): the tokenizer's own end id is switched off (`ignore_eos`), since vLLM
                would stop there even if the model's generation settings do not name it. The id stays the last one.
    sampling    the model's generation settings are not looked at (`generation_config`): vLLM would take its
                temperature, top_p and penalties from there.
    coins       one seed for each prompt, of (seed, its id): a text does not depend on its shard or on a resumed run. It
                does depend on vLLM's version and on the GPU, and in a batch on rounding.
    vocabulary  ids beyond the tokenizer's are pushed out of reach, as padded rows of a head must never be emitted
    length      `room`, as in decode.py; the engine's own limit is the longest text of the corpus, so that a model made
                for long contexts does not ask for a cache that the GPUs lack
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch

from kernels.sampling import is_greedy, prompt_key
from stages.common.decode import Decoded, room
from stages.common.hub import local_folder
from stages.common.models import Sizes, end_ids_of
from stages.trajectories.params import Trajectories, Vllm

OUT_OF_REACH = -1e9  # added to the score of an id that is no word


def version() -> str:
    """The installed vLLM's. ValueError if there is none."""
    try:
        return version_of("vllm")
    except PackageNotFoundError:
        raise ValueError(
            "trajectories.engine: vllm is not installed; install it (https://docs.vllm.ai) or leave engine out, "
            "for transformers"
        ) from None


class Engine:
    """vLLM with one verifier loaded. Loading waits for the first shard: a run that has them all needs no GPU."""

    def __init__(
        self,
        folder: Path,
        params: Trajectories,
        *,
        seed: int,
        dtype: torch.dtype,
        longest: int,
        words: int,
        sizes: Sizes,
    ) -> None:
        """`longest`: tokens of the corpus's longest prompt. `words`: ids that the tokenizer knows."""
        assert isinstance(params.engine, Vllm)
        self.folder, self.params, self.settings = folder, params, params.engine
        self.seed, self.dtype = seed, str(dtype).removeprefix("torch.")
        self.words, self.sizes = words, sizes
        self.length = longest + self._room(longest)
        self.end_ids = frozenset(end_ids_of(folder))
        self._llm: Any = None

    def decode(self, keys: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[Decoded]:
        """The continuation of each prompt, in order. ValueError on a text that vLLM gave up or that is not one."""
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        sampling = [self._sampling(key, len(prompt)) for key, prompt in zip(keys, prompts, strict=True)]
        answers = self._loaded().generate(asked, sampling, use_tqdm=False)
        return [self._decoded(key, answer.outputs[0]) for key, answer in zip(keys, answers, strict=True)]

    def _loaded(self) -> Any:
        if self._llm is None:
            self._llm = import_module("vllm").LLM(
                model=str(local_folder(self.folder)),
                tensor_parallel_size=self.settings.tensor_parallel,
                gpu_memory_utilization=self.settings.memory_share,
                dtype=self.dtype,
                seed=self.seed % 2**32,
                max_model_len=self.length,
                generation_config="vllm",
            )
        return self._llm

    def _room(self, prompt_length: int) -> int:
        return room(
            context_limit=self.sizes.context_limit,
            prompt_length=prompt_length,
            max_new_tokens=self.params.max_new_tokens,
        )

    def _sampling(self, key: str, prompt_length: int) -> Any:
        p = self.params
        greedy = is_greedy(p.temperature)
        return import_module("vllm").SamplingParams(
            temperature=0.0 if greedy else p.temperature,
            top_k=p.top_k or -1,
            top_p=p.top_p,
            seed=None if greedy else prompt_key(f"{self.seed} {key}"),
            max_tokens=self._room(prompt_length),
            stop_token_ids=sorted(self.end_ids),
            ignore_eos=True,
            detokenize=False,
            logit_bias=dict.fromkeys(range(self.words, self.sizes.vocab), OUT_OF_REACH) or None,
        )

    def _decoded(self, key: str, output: Any) -> Decoded:
        ids, reason = [int(i) for i in output.token_ids], output.finish_reason
        if reason == "stop" and output.stop_reason in self.end_ids and ids[-1:] != [output.stop_reason]:
            ids.append(int(output.stop_reason))  # a version that leaves it out
        ends = bool(ids) and ids[-1] in self.end_ids
        if reason not in ("stop", "length") or (reason == "stop") != ends or self.end_ids.intersection(ids[:-1]):
            raise ValueError(
                f"vLLM {version()}: prompt {key!r} came back as {reason!r} ({output.stop_reason!r}) with {len(ids)} "
                "tokens, which is no text up to an end id or a length; use another version, or leave engine out"
            )
        if beyond := [i for i in ids if not 0 <= i < self.words]:
            raise ValueError(f"vLLM {version()}: prompt {key!r} got id {beyond[0]}, which the tokenizer does not know")
        return Decoded(ids, reason)
