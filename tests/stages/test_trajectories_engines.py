"""Shards over several processes, and vLLM's interface: the same contract of the output as one process of our own."""

import os
import subprocess
import sys
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.sampling import prompt_key
from stages.common import parallel, params, store
from stages.common.decode import decode_batch
from stages.common.models import load_tokenizer, load_verifier
from stages.common.tiny import END_IDS, VOCABULARY, build_tiny, save_tiny
from stages.trajectories import vllm
from stages.trajectories.__main__ import main
from tests.stages.test_trajectories import ROOT, RUN, TEXTS, output, place, shards, write_corpus, write_params

assert place  # a fixture
VLLM = {"name": "vllm", "tensor_parallel": 2, "memory_share": 0.5}

# Runs of 1, 3 and 2 processes in a folder, forked from one that has imported everything. The three are killed as soon
# as a shard is there, and a shard takes them a while; what the one wrote is put aside first.
DRIVER = """
import os, signal, shutil, socket, sys, time
from pathlib import Path
from stages.common import entry, store
from stages.trajectories.__main__ import main
from stages.trajectories.shards import Shards

def start(world, slow=0.0):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world)}
    children = []
    for rank in range(world):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = os.open(f"{world}_{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 2)
            whole = Shards.save
            Shards.save = lambda *words: (whole(*words), time.sleep(slow))
            entry.run(main, argv=["tiny"])
            os._exit(0)
    return children

sys.argv = ["stages/trajectories/__main__.py", "tiny"]
assert [os.waitpid(child, 0)[1] for child in start(1)] == [0]
shutil.move("data/tiny/contexts", "alone")
shutil.move("data/tiny/trajectories.parquet", "alone/trajectories.parquet")
children = start(3, slow=0.5)
while not list(Path("data/scratch").rglob("shard_*.parquet")):
    time.sleep(0.01)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
shutil.copytree("data/scratch", "left")
assert not store.trajectories_file("tiny").exists()
assert [os.waitpid(child, 0)[1] for child in start(2)] == [0, 0]
"""


def test_two_processes_write_the_bytes_of_one_also_after_a_kill_at_another_number(place):
    said = subprocess.run(
        [sys.executable, "-c", DRIVER], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    logs = {path.stem: path.read_text() for path in sorted(Path().glob("*.log"))}
    assert said.returncode == 0, f"{said.stderr}\n{logs}"
    assert output() == {path.name: path.read_bytes() for path in Path("alone").iterdir()}
    assert 0 < len(list(Path("left").rglob("shard_*.parquet"))) < 4, "killed part-way"
    assert not shards()
    assert "process 1 of 2" in logs["2_0"]
    assert "text/s" not in logs["2_1"], "one process shows the progress"


def test_a_stage_that_was_launched_does_nothing_itself(place, monkeypatch):
    asked = []
    monkeypatch.setattr(parallel, "launch", lambda run, processes: asked.append((run, processes)) or processes > 1)
    write_params(processes=2)
    main(RUN)
    assert not store.trajectories_file("tiny").exists()
    write_params()
    main(RUN)
    assert store.trajectories_file("tiny").exists()
    assert asked == [(RUN, 2), (RUN, 1)]


@pytest.mark.large
def test_a_stage_that_asks_for_processes_starts_them_itself(place):
    def written() -> dict[str, bytes]:
        words = [sys.executable, "-m", "stages.trajectories", "tiny"]
        said = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        return output()

    wanted = written()
    store.trajectories_file("tiny").unlink()
    write_params(processes=2)
    assert written() == wanted


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    from stages.trajectories.ranks import Ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert [Ranks(r, 4, r % 2).device("cuda") for r in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert Ranks(0, 1, 0).device("cuda") == "cuda"
    assert Ranks(1, 2, 1).device("cpu") == "cpu"
    with pytest.raises(ValueError, match=r"process 2 .* has no GPU of its own: there are 2; lower trajectories\.proc"):
        Ranks(2, 3, 2).device("cuda")


# vLLM ---------------------------------------------------------------------------------------------------------


@dataclass
class SamplingParams:
    """Fields and defaults of vLLM's, as far as this project may set them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None


@dataclass
class CompletionOutput:
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | None = None


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


@dataclass
class StandIn:
    """vLLM's module and what it was asked for; texts are the real verifier's, one at a time."""

    change: Any = None  # made to an output
    engines: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[dict[str, Any], SamplingParams]] = field(default_factory=list)

    def module(self) -> types.ModuleType:
        stand_in, module = self, types.ModuleType("vllm")

        class LLM:
            def __init__(
                self,
                model: str,
                *,
                tensor_parallel_size: int,
                gpu_memory_utilization: float,
                dtype: str,
                seed: int,
                max_model_len: int,
                generation_config: str,
            ) -> None:
                stand_in.engines.append({k: v for k, v in locals().items() if k not in ("self", "stand_in")})
                self.verifier = load_verifier(Path(model), dtype=getattr(torch, dtype))
                self.limit = max_model_len

            def generate(self, prompts, sampling_params, *, use_tqdm):
                stand_in.asked += zip(prompts, sampling_params, strict=True)
                return [self.answer(*pair) for pair in zip(prompts, sampling_params, strict=True)]

            def answer(self, prompt, sampling):
                assert prompt.keys() == {"prompt_token_ids"}
                ids = prompt["prompt_token_ids"]
                assert len(ids) + sampling.max_tokens <= self.limit
                (text,) = decode_batch(
                    self.verifier,
                    [ids],
                    keys=["-"],
                    seed=0,
                    temperature=0.0,
                    max_new_tokens=sampling.max_tokens,
                    batch_size=1,
                )
                stop = text.output_ids[-1] if text.finish_reason == "stop" else None
                output = CompletionOutput(tuple(text.output_ids), text.finish_reason, stop)
                return RequestOutput([stand_in.change(output) if stand_in.change else output])

        module.LLM, module.SamplingParams = LLM, SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        return module


@pytest.fixture
def stand_in(place, monkeypatch) -> StandIn:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "vllm", made.module())
    monkeypatch.setattr(vllm, "version_of", lambda name: {"vllm": "0.99"}[name])
    return made


def rows() -> list[dict[str, Any]]:
    return store.read_parquet(store.trajectories_file("tiny"), store.TRAJECTORIES)


def test_vllm_writes_the_same_rows_with_its_name_on_them(stand_in):
    """Greedy, so that both engines have one text to write; some end at an end id and some at the length."""
    plain = {"temperature": 0.0, "keep_layers": [], "max_new_tokens": 40}
    write_params(**plain)
    main(RUN)
    wanted = rows()
    assert {row["finish_reason"] for row in wanted} == {"stop", "length"}
    assert not stand_in.engines
    assert "engine" not in store.read_provenance(store.trajectories_file("tiny"))
    write_params(**plain, engine=VLLM)
    main(RUN)
    assert rows() == wanted
    found = store.read_provenance(store.trajectories_file("tiny"))
    assert found["engine"] == {"name": "vllm", "version": "0.99"}
    assert found["params"]["engine"] == VLLM
    assert [path.name for path in store.contexts_folder("tiny").iterdir()] == ["index.json"]


def test_what_vllm_is_asked_for(stand_in):
    """Its own defaults would cap the texts at 16 tokens, take sampling from generation_config, and use all ids."""
    write_params(keep_layers=[], max_new_tokens=40, top_k=0, top_p=0.9, engine=VLLM)
    main(RUN)
    tokenizer = load_tokenizer(store.verifier_folder("tiny"))
    prompts = [tokenizer.encode_prompt([text]) for text in TEXTS]
    assert stand_in.engines == [
        {
            "model": str(store.verifier_folder("tiny")),
            "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.5,
            "dtype": "float32",
            "seed": 3,
            "max_model_len": max(map(len, prompts)) + 40,
            "generation_config": "vllm",
        }
    ]
    assert [prompt["prompt_token_ids"] for prompt, _ in stand_in.asked] == prompts
    for number, (_, sampling) in enumerate(stand_in.asked):
        assert sampling == SamplingParams(
            temperature=0.8,
            top_k=-1,
            top_p=0.9,
            seed=prompt_key(f"3 c/{number}"),
            stop_token_ids=sorted(END_IDS),
            ignore_eos=True,
            max_tokens=40,
            detokenize=False,
            logit_bias=dict.fromkeys(range(VOCABULARY, VOCABULARY + 5), -1e9),
        )
    assert len({sampling.seed for _, sampling in stand_in.asked}) == len(TEXTS)


def test_no_text_outgrows_the_context(stand_in):
    save_tiny(store.verifier_folder("tiny"), build_tiny("llama", seed=1, context=96))
    write_corpus(["a", "b" * 30])
    write_params(keep_layers=[], max_new_tokens=80, temperature=0.0, engine=VLLM)
    main(RUN)
    lengths = [len(prompt["prompt_token_ids"]) for prompt, _ in stand_in.asked]
    assert [sampling.max_tokens for _, sampling in stand_in.asked] == [96 - length for length in lengths]
    assert stand_in.engines[0]["max_model_len"] == 96


def test_a_killed_run_keeps_its_shards_and_starts_no_engine_for_them(stand_in, monkeypatch):
    write_params(keep_layers=[], engine=VLLM)
    main(RUN)
    undisturbed, asked = rows(), len(stand_in.asked)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_parquet", interrupt_after(2))
        with pytest.raises(KeyboardInterrupt):
            main(RUN)
    assert len(shards()) == 2
    main(RUN)
    assert rows() == undisturbed
    assert len(stand_in.asked) == 2 * asked + 4, "the shard that was lost is asked for twice, none else"
    monkeypatch.setattr(vllm, "version_of", lambda name: "1.0")
    main(RUN)
    assert len(stand_in.asked) == 3 * asked + 4, "another version starts over"


def interrupt_after(count: int):
    whole, left = store.write_parquet, count

    def write(*words):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        whole(*words)

    return write


def test_an_end_id_that_vllm_leaves_out_is_put_back(stand_in):
    write_params(keep_layers=[], temperature=0.0, max_new_tokens=40, engine=VLLM)
    main(RUN)
    wanted = rows()

    def dropped(output: CompletionOutput) -> CompletionOutput:
        if output.finish_reason == "stop":
            output.token_ids = output.token_ids[:-1]
        return output

    stand_in.change = dropped
    main(RUN)
    assert rows() == wanted


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (CompletionOutput((5, 6), "abort"), r"vLLM 0\.99: prompt 'c/0' came back as 'abort' \(None\) with 2 tokens"),
        (CompletionOutput((5, 6), "stop", 6), "came back as 'stop'"),
        (CompletionOutput((5, 2, 6), "length"), "came back as 'length'"),
        (CompletionOutput((5, 2), "length"), "came back as 'length'"),
        (CompletionOutput((), "stop"), "came back as 'stop'"),
        (CompletionOutput((5, VOCABULARY), "length"), "'c/0' got id 259, which the tokenizer does not know"),
    ],
)
def test_what_is_no_text_stops_the_stage(stand_in, output, message):
    stand_in.change = lambda _: output
    write_params(keep_layers=[], engine=VLLM)
    with pytest.raises(ValueError, match=message):
        main(RUN)
    assert not store.trajectories_file("tiny").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "vllm"}, r"tiny\.trajectories: engine: write \{name: vllm, tensor_parallel"),
        ({"engine": "sglang"}, r"trajectories\.engine: 'sglang' is not one of transformers, vllm"),
        ({"engine": VLLM, "keep_layers": [1]}, r"keep_layers: \[1\]: vLLM.*write \[\].*adapt\.prefix: own or bidirec"),
        ({"engine": VLLM, "processes": 2}, "processes: 2: vLLM starts its own"),
        ({"engine": VLLM, "temperature": 0.005}, "temperature: 0.005: vLLM samples at temperatures from 0.01 to 2"),
        ({"engine": VLLM | {"memory_share": 9}}, r"engine\.memory_share: 9.* is out of range"),
        ({"processes": 0}, r"trajectories\.processes: 0 is out of range"),
    ],
)
def test_settings_that_do_not_go_together(place, change, message):
    write_params(**{"keep_layers": []} | change)
    with pytest.raises(params.ParamError, match=message):
        main(RUN)


def test_vllm_that_is_not_installed_is_named(place, monkeypatch):
    def missing(name):
        raise vllm.PackageNotFoundError(name)

    monkeypatch.setattr(vllm, "version_of", missing)
    write_params(keep_layers=[], engine=VLLM)
    with pytest.raises(ValueError, match=r"trajectories\.engine: vllm is not installed; install it"):
        main(RUN)


def test_vllm_under_torchrun_is_refused(place, monkeypatch):
    from stages.common.entry import Device, Placement
    from stages.trajectories.ranks import Ranks
    from stages.trajectories.write import check_ranks

    device = Device(name="cuda", dtype="float32", threads=1)
    write_params(keep_layers=[], engine=VLLM)
    settings = params.load(vllm.Trajectories, "tiny", "trajectories")
    check_ranks(settings, device, Ranks(0, 1, 0))
    with pytest.raises(ValueError, match="vLLM starts its own processes"):
        check_ranks(settings, device, Ranks(0, 2, 0))
    spread = replace(device, placement=Placement(verifier="auto", drafter=""))
    check_ranks(settings, spread, Ranks(0, 1, 0))
    write_params(keep_layers=[])
    settings = params.load(vllm.Trajectories, "tiny", "trajectories")
    for world in (1, 2):
        with pytest.raises(ValueError, match=r"placement.verifier: auto: .* write trajectories.engine: {name: vllm"):
            check_ranks(settings, spread, Ranks(0, world, 0))


@pytest.mark.gpu
def test_the_real_vllm_writes_nearly_the_texts_of_transformers(place):
    """Runs where vLLM and a GPU are. Rounding may turn a text of a random model, and all that follows in it."""
    pytest.importorskip("vllm")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    save_tiny(store.verifier_folder("tiny"), build_tiny("llama", seed=1, width=256, heads=4))  # heads of 64 numbers
    plain = {"keep_layers": [], "temperature": 0.0, "max_new_tokens": 24}
    write_params(**plain)
    main(RUN)
    wanted = rows()
    write_params(**plain, engine=VLLM | {"tensor_parallel": 1})
    main(RUN)
    found = rows()
    assert [row["prompt_ids"] for row in found] == [row["prompt_ids"] for row in wanted]
    equal = sum(a["output_ids"] == b["output_ids"] for a, b in zip(found, wanted, strict=True))
    assert equal >= len(wanted) // 2
    for row in found:
        assert (row["finish_reason"] == "stop") == (row["output_ids"][-1] in END_IDS)
        assert not set(row["output_ids"][:-1]) & set(END_IDS)
