"""A plan against what small models really hold and compute: within a fifth, and most of it to the byte."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from kernels import objectives
from kernels.tree import Tree
from stages.adapt import __main__ as adapt
from stages.common import decode, optimizers, tiny, training, windows
from stages.common.drafters import Drafter, prune
from stages.common.models import Verifier
from stages.common.params import ParamError, load, profiles
from stages.common.windows import Batch, Example
from stages.evaluate.harness import Shared
from stages.plan import advice, memory, needs, overview, settings, table, work
from stages.plan.__main__ import words
from stages.plan.settings import Parallel, Training
from stages.plan.shapes import Shape, of_config
from stages.trajectories.write import Trajectories

VOCAB, WORDS = 300, 200
SIZES = {"layers": 3, "width": 64, "heads": 4, "key_heads": 2}
TEXTS, LENGTH = 3, 96
TRAINING = Training(
    steps=4,
    sequences=TEXTS,
    accumulation=1,
    max_tokens=LENGTH,
    optimizer="adamw",
    evaluate_every=2,
    windows=4,
    window=5,
)
PAIRS = ("qwen14b", "qwen72b", "llama13b", "llama70b")
STRICT = ("smoke", "cpu", "cpu_long")
CLOSE = 0.2


def close(planned: float, measured: float) -> bool:
    return abs(planned - measured) <= CLOSE * measured


@pytest.fixture(scope="module")
def causal_lm():
    return tiny.build_tiny("qwen2", seed=0, tied=False, vocab=VOCAB, context=512, **SIZES)


@pytest.fixture
def shape(causal_lm) -> Shape:
    return of_config(causal_lm.config.to_dict())


def drafter_of(causal_lm, prefix: str) -> Drafter:
    layers = range(SIZES["layers"])
    drafter = prune(causal_lm, layers=layers, d2t=torch.arange(WORDS), vocab_size=VOCAB, prefix=prefix)
    for p in drafter.trained():
        p.requires_grad_(True)
    return drafter


class Caches(dict):
    """What the verifier cached of every text: numbers that only their size matters of."""

    def __missing__(self, name):
        head = SIZES["width"] // SIZES["heads"]
        return torch.zeros(SIZES["layers"], 2, SIZES["key_heads"], LENGTH - 1, head)


def batch_of(drafter: Drafter) -> Batch:
    ids = torch.randint(0, WORDS, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [Example(id=str(i), ids=tuple(row), prompt_length=20) for i, row in enumerate(ids)]
    contexts = Caches() if drafter.prefix == "verifier" else None
    return windows.collate(
        texts, drafter, contexts, windows=TRAINING.windows, window=TRAINING.window, full_mask_share=1.0, seed=0, step=1
    )


def loss_of(drafter: Drafter, batch: Batch) -> torch.Tensor:
    return objectives.streak(windows.log_q(drafter, batch), batch.layout.valid_BWG.flatten(0, 1))


@contextmanager
def kept(module: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of what autograd keeps within, by storage, weights apart."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    found, alive = dict[int, int](), []

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # else another tensor may get its place
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


def counted(compute) -> int:
    """Operations by torch's own count, which knows attention as two products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        compute()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gemma3_text", "mistral"])
def test_parameters_are_those_of_transformers(kind):
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **sizes, head_dim=16, intermediate_size=80, vocab_size=VOCAB)
    if kind == "qwen2":
        config.head_dim = 12  # which it does not know of
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config)
    assert of_config(config.to_dict()).parameters == sum(p.numel() for p in causal_lm.parameters())


def test_the_table_of_shapes_has_the_published_sizes():
    published = {
        "Qwen/Qwen2.5-14B-Instruct": 14.77e9,
        "Qwen/Qwen2.5-72B-Instruct": 72.71e9,
        "meta-llama/Llama-2-13b-chat-hf": 13.02e9,
        "meta-llama/Llama-2-70b-chat-hf": 68.98e9,
        "apple/DiffuCoder-7B-cpGRPO": 7.62e9,
        "diffusionfamily/diffullama": 6.74e9,
    }
    found = {name: of_config(node).parameters for name, node in settings.facts()["shapes"].items()}
    for name, size in published.items():
        assert found[name] == pytest.approx(size, rel=0.002)


@pytest.mark.parametrize("prefix", ["own", "verifier"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_training_step_holds_what_is_planned(causal_lm, shape, prefix, optimizer):
    drafter = drafter_of(causal_lm, prefix)
    batch = batch_of(drafter)
    with kept(drafter) as saved:
        loss = loss_of(drafter, batch)
    activations = sum(saved.values())
    loss.backward()
    rates = {"steps": 1, "lr": 0.01, "lr_other": 0.01, "weight_decay": 0.0, "warmup": 0.0, "final_lr": 1.0}
    optims = optimizers.optimizers(drafter, optimizers.Rates(optimizer=optimizer, **rates))
    for optim in optims:
        optim.step()
    measured = {
        "weights": 4 * sum(p.numel() for p in drafter.parameters()),
        "gradients": sum(p.grad.nbytes for p in drafter.trained() if p.grad is not None),
        "optimizer": sum(t.nbytes for optim in optims for state in optim.state.values() for t in tensors(state)),
        "activations and scores": activations,
    }
    planned = needs.training_memory(
        replace(TRAINING, optimizer=optimizer), shape, words=WORDS, prefix=prefix, mixed=False
    )
    for part in ("weights", "gradients", "optimizer"):
        assert planned[part] == pytest.approx(measured[part], rel=0.01), part
    scores = planned["logits"] / memory.SCORES  # of which autograd keeps one copy
    assert close(planned["activations"] + scores, activations)


def tensors(state: Mapping[str, object]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]


@pytest.mark.parametrize("prefix", ["own", "verifier"])
def test_a_training_step_computes_what_is_planned(causal_lm, shape, prefix):
    drafter = drafter_of(causal_lm, prefix)
    batch = batch_of(drafter)
    rows = needs.rows_of(TRAINING, prefix, texts=TEXTS)
    planned = work.step(shape, rows=rows.total, columns=rows.columns, heads=rows.heads, vocab=WORDS)
    assert close(planned, counted(lambda: loss_of(drafter, batch).backward()))


def test_passes_in_bfloat16_keep_what_is_planned(causal_lm, shape):
    """float32 masters under autocast, as `parallel` trainings run on a GPU."""
    drafter = drafter_of(causal_lm, "own")
    batch = batch_of(drafter)
    with kept(drafter) as saved, torch.autocast("cpu", torch.bfloat16):
        loss_of(drafter, batch)
    rows = needs.rows_of(TRAINING, "own", texts=TEXTS)
    planned = memory.activations(shape, rows, mixed=True) + memory.scores(heads=rows.heads, vocab=WORDS, copies=1)
    assert close(planned, sum(saved.values()))


def test_checkpointed_activations_keep_the_inputs_of_layers_and_compute_once_more(causal_lm, shape):
    drafter = drafter_of(causal_lm, "own")
    batch = batch_of(drafter)
    plain = counted(lambda: loss_of(drafter, batch).backward())
    for layer in drafter.body.layers:
        layer.forward = checkpointed(layer.forward)
    again = counted(lambda: loss_of(drafter, batch).backward())
    rows = needs.rows_of(TRAINING, "own", texts=TEXTS)
    sizes = {"rows": rows.total, "columns": rows.columns, "heads": rows.heads, "vocab": WORDS}
    added = work.step(shape, **sizes, checkpoint=True) - work.step(shape, **sizes)
    assert close(added, again - plain)
    with kept(drafter) as saved:
        loss_of(drafter, batch)
    one = memory.activations(shape.cut(1), rows, mixed=False) - memory.activations(shape.cut(0), rows, mixed=False)
    outside = memory.activations(shape, rows, mixed=False, checkpoint=True) - one  # the layer that is computed again
    mask = 4 * TEXTS * (shape.heads // shape.key_heads) * rows.rows * rows.columns  # which the layers' closures hold
    planned = outside - mask + memory.scores(heads=rows.heads, vocab=WORDS, copies=1)
    assert close(planned, sum(saved.values()))


def checkpointed(forward):
    def again(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again


def test_decoding_holds_and_computes_what_is_planned(causal_lm, shape, monkeypatch):
    """A batch's cache, and the pass that verifies a tree."""
    held = []

    class Cache(decode.RaggedKVCache):
        def __init__(self, **sizes):
            super().__init__(**sizes)
            held.append(self)

    monkeypatch.setattr(decode, "RaggedKVCache", Cache)
    verifier = Verifier(causal_lm, vocab_size=VOCAB, end_ids=())
    prompts = [[1 + i % 7 for i in range(20)], [2 + i % 5 for i in range(20)]]
    decode.decode_batch(verifier, prompts, keys=["a", "b"], seed=0, temperature=0.0, max_new_tokens=12, batch_size=2)
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in everything(held[0])}
    assert close((2 + 1) * (20 + 12) * shape.cache_bytes(number=4), sum(buffers.values()))

    cached, nodes = 200, 31
    tree = Tree(torch.zeros(nodes, dtype=torch.long), torch.arange(-1, nodes - 1))
    engine_rows = torch.arange(cached, cached + nodes + 1)
    cache = verifier.new_cache(cached + nodes + 1)
    with torch.inference_mode():
        verifier.prefill([1] * cached, cache)
        sees = torch.ones(nodes + 1, cached + nodes + 1, dtype=torch.bool)
        ids = torch.cat([torch.zeros(1, dtype=torch.long), tree.tokens_N])[None]
        measured = counted(lambda: verifier.logits(verifier(ids, engine_rows[None], sees, cache)))
    planned = work.forward(shape, rows=nodes + 1, columns=cached + nodes + 1, heads=nodes + 1)
    assert close(planned, measured)


def everything(cache: object) -> list[torch.Tensor]:
    """The tensors that an object holds, in lists and objects, too."""
    found, waiting, seen = [], [cache], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
        elif hasattr(item, "__dict__"):
            waiting += vars(item).values()
    return found


@pytest.fixture(scope="module")
def qwen14b() -> settings.Profile:
    return settings.read("qwen14b")


def distilled(p: settings.Profile, **changed) -> settings.Profile:
    return replace(p, distilling=replace(p.distilling, **changed))


def test_what_does_not_fit_is_named_with_a_setting_that_makes_it_fit(qwen14b):
    plain = distilled(qwen14b, lora=None, parallel=None, sequences=8)
    need = overview.distilling(plain, "streak", plain.distilling)
    assert not advice.fits(plain, need)
    said = advice.advice(plain, need)
    assert "distill.training.parallel.strategy: fsdp2" in said
    mended = distilled(plain, parallel=Parallel(processes=8, strategy="fsdp2", checkpoint_activations=True))
    assert advice.fits(mended, overview.distilling(mended, "streak", mended.distilling))


def test_on_one_gpu_only_an_adapter_fits(qwen14b):
    alone = replace(distilled(qwen14b, lora=None, parallel=None), plan=replace(qwen14b.plan, count=1))
    said = advice.advice(alone, overview.distilling(alone, "streak", alone.distilling))
    assert "distill.training.lora: {rank: 32, ...}" in said
    assert "GPUs asked for" in advice.advice(alone, needs.trajectories(alone))


def test_a_large_batch_and_a_large_verifier_are_advised_on(qwen14b):
    wide = replace(qwen14b, trajectories=replace(qwen14b.trajectories, batch_size=512))
    assert "trajectories.batch_size: 64" in advice.advice(wide, needs.trajectories(wide))
    big = replace(settings.read("qwen72b"), placement=settings.Placement(verifier="one"))
    for need in overview.overview(big):
        if need.stage == "vanilla" or need.stage.startswith("evaluate"):
            assert "device.placement.verifier: auto" in advice.advice(big, need)


@pytest.mark.parametrize("profile", PAIRS)
def test_the_papers_pairs_fit_as_they_stand(profile):
    p = settings.read(profile)
    assert [need.stage for need in overview.overview(p) if need.memory and not advice.fits(p, need)] == []


@pytest.mark.parametrize("profile", profiles())
def test_a_plan_is_a_table_of_100_columns_with_every_stage(profile):
    p = settings.read(profile)
    found = overview.overview(p)
    printed = table.text(p, found)
    assert max(map(len, printed.splitlines())) <= table.WIDTH
    for need in found:
        assert need.stage in printed
    assert f"profiles=[{profile}]" in printed
    if p.adapting.steps or p.distilling.steps:
        assert {"trajectories", "vanilla", *(f"distill {name}" for name in p.names("objectives"))} <= {
            need.stage for need in found
        }


def test_the_command_line_takes_the_profile_with_and_without_its_flag():
    assert words(["--profile", "cpu"]) == words(["--profile=cpu"]) == words(["cpu"]) == ["cpu"]


def test_hours_follow_the_rates(qwen14b):
    """Half as fast, twice as long; a pass that reads all weights goes with the bandwidth."""
    found = overview.distilling(qwen14b, "streak", qwen14b.distilling)
    a100, h100 = needs.KINDS["a100"], needs.KINDS["h100"]
    assert found.seconds["a100"] / found.seconds["h100"] == pytest.approx(h100.flops / a100.flops)
    reading = work.pass_seconds(a100, needs.ASSUMED, flops=1e9, read=30e9, layers=48)
    assert reading == pytest.approx(30e9 / (a100.bandwidth * needs.ASSUMED.bandwidth_share))


def test_a_wrong_value_is_named_by_its_key(tmp_path, monkeypatch):
    text = Path("params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text.replace("count: 8     # ours", "count: 0     # ours"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamError, match=r"qwen14b\.plan\.count"):
        settings.read("qwen14b")


@pytest.mark.parametrize("profile", STRICT)
def test_the_stages_read_the_same_values(profile):
    """A setting that a stage calls by another name would be a default here."""
    p = settings.read(profile)
    for mine, cls, keys in (
        (p.adapting, training.Training, ("adapt", "training")),
        (p.distilling, training.Training, ("distill", "training")),
        (p.adapt, adapt.Params, ("adapt",)),
        (p.trajectories, Trajectories, ("trajectories",)),
        (p.shared, Shared, ("evaluate", "shared")),
    ):
        theirs = load(cls, profile, *keys)
        for name in {field.name for field in fields(mine)} & {field.name for field in fields(cls)}:
            assert same(getattr(mine, name), getattr(theirs, name)), f"{keys}: {name}"


def same(mine: object, theirs: object) -> bool:
    """Equal, or a section whose fields here are those of the stage."""
    if not is_dataclass(mine):
        return mine == theirs
    return all(same(getattr(mine, field.name), getattr(theirs, field.name)) for field in fields(mine))
