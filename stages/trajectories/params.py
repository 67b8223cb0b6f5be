"""`<profile>.trajectories`: what is decoded, and by which engine."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from kernels.sampling import is_greedy
from stages.common.params import Between, Count, Natural, NonNegative


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """`engine: {name: vllm, ...}`."""

    name: Literal["vllm"]
    tensor_parallel: Count  # GPUs that share the verifier
    memory_share: Annotated[float, Between(0.05, 1.0)]  # of each GPU's memory, for weights and cache


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """`<profile>.trajectories`."""

    temperature: NonNegative  # the verifier's own, T_v
    top_k: Natural  # 0: all
    top_p: Annotated[float, Between(1e-6, 1.0)]
    max_new_tokens: Count
    batch_size: Count  # texts decoded side by side; vLLM finds its own
    keep_layers: tuple[int, ...]  # of the verifier, whose keys and values are kept for drafters that read them
    shard_size: Count  # texts between two saves
    engine: Literal["transformers", "vllm"] | Vllm = "transformers"
    processes: Count = 1  # that decode shards side by side, each with a verifier of its own

    def __post_init__(self) -> None:
        if len(set(self.keep_layers)) < len(self.keep_layers):
            raise ValueError(f"keep_layers: {list(self.keep_layers)} names a layer twice; write each once")
        if self.engine == "vllm":
            raise ValueError("engine: write {name: vllm, tensor_parallel: GPUs, memory_share: 0.9}")
        if isinstance(self.engine, Vllm):
            self._check_vllm()

    def _check_vllm(self) -> None:
        if self.keep_layers:
            raise ValueError(
                f"keep_layers: {list(self.keep_layers)}: vLLM does not hand out its cache; write [] and let the "
                "drafter read its own prefix (adapt.prefix: own or bidirectional)"
            )
        if self.processes > 1:
            raise ValueError(f"processes: {self.processes}: vLLM starts its own (engine.tensor_parallel); write 1")
        if not is_greedy(self.temperature) and not 0.01 <= self.temperature <= 2:
            raise ValueError(
                f"temperature: {self.temperature}: vLLM samples at temperatures from 0.01 to 2, and would change this "
                "one; write 0 or one of those"
            )

    def described(self) -> dict[str, Any]:
        """What decides the texts, as JSON values: how many processes share the work does not, nor does the default."""
        values = asdict(self)
        del values["processes"]
        if self.engine == "transformers":
            del values["engine"]
        return values
