"""What cells and sweeps take: one text after the other, drafted and verified."""

from dataclasses import replace
from typing import Any

from stages.common import sweeps
from stages.common.params import raw
from stages.plan import memory, work
from stages.plan.needs import ASSUMED, KINDS, PREFILL_ROWS, Need, Text, passing, spread
from stages.plan.settings import Method, Profile, Shared, method_of
from stages.plan.shapes import Shape

VANILLA = "vanilla"


def cells(p: Profile, name: str) -> Need:
    """Every benchmark of the profile's list with one method, one process after the other."""
    method = Method() if name == VANILLA else method_of(p.name, name)
    texts = sum(p.texts[benchmark] for benchmark in p.names("benchmarks"))
    stage = VANILLA if name == VANILLA else f"evaluate {name}"
    return decoded(p, stage, method, p.shared, texts, vanilla=name == VANILLA)


def sweep(p: Profile, name: str) -> Need:
    """All points of a study, each beside vanilla."""
    form = sweeps.read(p.name, name)
    found = [_point(p, form, point) for point in sweeps.points(form)]
    most = max(found, key=lambda need: need.bytes)
    return Need(
        stage=f"sweep {name}",
        gpus=most.gpus,
        memory=most.memory,
        tokens=sum(need.tokens for need in found),
        flops=sum(need.flops for need in found),
        seconds={kind: sum(need.seconds[kind] for need in found) for kind in KINDS},
    )


def _point(p: Profile, form: sweeps.Sweep, point: sweeps.Spelled) -> Need:
    method = Method() if point.method == VANILLA else method_of(p.name, point.method)
    own: dict[str, Any] = {name: value for name, value in point.settings.items() if name in vars(method)}
    shared: dict[str, Any] = {
        name.removeprefix("shared."): value
        for name, value in point.settings.items()
        if name.removeprefix("shared.") in vars(p.shared)
    }
    settings, limits = replace(method, **own), replace(p.shared, **shared)
    return decoded(p, "", settings, limits, form.prompts, vanilla=point.method == VANILLA)


def decoded(p: Profile, stage: str, method: Method, shared: Shared, texts: int, *, vanilla: bool) -> Need:
    """So many texts with one method; the yardstick's vanilla steps are counted, too."""
    shape, text = p.verifier, Text(p.longest_prompt, shared.max_new_tokens)
    nodes = 0 if vanilla else method.verified
    drafter = None if vanilla or method.drafter is None else drafter_of(p, method)
    together, apart = spread(p), p.plan.count if p.placement.verifier == "tp" else 1
    per_token = shape.cache_bytes(number=p.number)
    parts = {
        "weights": p.number * shape.parameters / together,
        "cache": per_token * (text.longest + nodes) / together,
        "activations": passing(p, shape, max(PREFILL_ROWS // 2, nodes + 1)),
        "logits": memory.scores(heads=nodes + 1, vocab=shape.vocab, copies=4),
    }
    if drafter is not None and p.placement.drafter == "":
        parts["drafter"] = float(p.number * drafter.parameters)
    repeats, cycles = texts * shared.repeats, text.output / (1 + ASSUMED.accepted if nodes else 1)
    verify = work.forward(shape, rows=nodes + 1, columns=text.middle + nodes, heads=nodes + 1)
    draft = drafting_flops(p, drafter, method, text)
    steps = cycles if vanilla else text.output * shared.yardstick_tokens / shared.yardstick_every
    vanilla_flops = work.forward(shape, rows=1, columns=text.middle, heads=1)
    prefill = work.forward(shape, rows=text.prompt, columns=text.prompt)
    read = p.number * (shape.parameters - shape.embedding) + text.middle * per_token
    seconds = {}
    for kind, gpu in KINDS.items():
        one = work.pass_seconds(gpu, ASSUMED, flops=vanilla_flops / apart, read=read / apart, layers=shape.layers)
        block = work.pass_seconds(gpu, ASSUMED, flops=verify / apart, read=read / apart, layers=shape.layers)
        own = 0.0
        if drafter is not None:
            bytes_ = p.number * (drafter.parameters - drafter.embedding)
            own = passes(p, method) * work.pass_seconds(
                gpu, ASSUMED, flops=draft / passes(p, method), read=bytes_, layers=drafter.layers
            )
        first = prefill / (gpu.flops * ASSUMED.batch_share)
        seconds[kind] = repeats * (first + steps * one + (0.0 if vanilla else cycles * (block + own)))
    work_done = prefill + steps * vanilla_flops + (0.0 if vanilla else cycles * (verify + draft))
    return Need(
        stage=stage,
        gpus=together,
        memory=parts,
        disk=repeats * text.output * 2 * ASSUMED.text_bytes,
        tokens=repeats * text.output,
        flops=repeats * work_done,
        seconds=seconds,
    )


def drafter_of(p: Profile, method: Method) -> Shape:
    """The shape that drafts; of a baseline about: the layers that its section says."""
    assert method.drafter is not None
    name = method.drafter.partition("@")[0]
    baselines = _section(p, "baselines")
    if name in baselines:
        return p.verifier.cut(baseline_layers(baselines[name]))
    return p.drafter


def passes(p: Profile, method: Method) -> int:
    """Drafting passes in a cycle."""
    causal = method.drafter in ("student", "hydra", "eagle", "eagle3")
    return method.gamma if causal else method.steps


def drafting_flops(p: Profile, drafter: Shape | None, method: Method, text: Text) -> float:
    """Of one cycle's drafting passes."""
    if drafter is None:
        return 0.0
    rows = {"bidirectional": text.middle + method.gamma, "verifier": method.gamma}
    width = rows.get(p.adapt.prefix, ASSUMED.accepted + method.gamma)
    one = work.forward(drafter, rows=width, columns=text.middle + method.gamma, heads=method.gamma, vocab=p.draft_words)
    return passes(p, method) * one


def baseline_layers(section: dict[str, Any]) -> int:
    """Layers of a baseline's drafter; medusa's and hydra's heads count as one."""
    layers = section.get("layers", 1)
    return len(layers) if isinstance(layers, list) else layers


def _section(p: Profile, name: str) -> dict[str, Any]:
    whole = raw(p.name)
    return whole.get(name) or {}
