"""Every stage that `dvc repro` runs for a profile, with what it takes."""

from collections.abc import Iterator
from typing import Any

from stages.common.params import raw
from stages.plan import decoding, needs
from stages.plan.needs import Need
from stages.plan.settings import Profile, Training, training_of


def overview(p: Profile) -> list[Need]:
    """In the order of dvc.yaml; stages that neither compute nor keep much are left out."""
    return [need for need in _needs(p) if need.disk or need.flops]


def _needs(p: Profile) -> Iterator[Need]:
    yield needs.models(p)
    yield needs.trajectories(p)
    yield adapting(p, p.adapting)
    for name in (*p.names("objectives"), *p.names("soft_objectives")):
        yield distilling(p, name, p.distilling)
    for name in p.names("sizes"):
        layers = len(raw(p.name, "sizes", name)["layers"])
        shape = p.verifier.cut(layers)
        words = min(p.draft_words, shape.vocab)
        yield needs.training(p, f"sizes {name}", p.adapting, shape, words=words, prefix=p.adapt.prefix, kept=False)
    if p.names("features"):
        yield needs.features(p, len(raw(p.name, "features")["layers"]))
    for name in p.names("baselines"):
        yield baseline(p, name, raw(p.name, "baselines", name))
    yield decoding.cells(p, decoding.VANILLA)
    for name in p.names("methods"):
        yield decoding.cells(p, name)
    for name in p.names("sweeps"):
        yield decoding.sweep(p, name)


def adapting(p: Profile, t: Training) -> Need:
    return needs.training(p, "adapt", t, p.drafter, words=p.draft_words, prefix=p.adapt.prefix, kept=False)


def distilling(p: Profile, name: str, t: Training) -> Need:
    return needs.training(p, f"distill {name}", t, p.drafter, words=p.draft_words, prefix=p.adapt.prefix, kept=True)


def baseline(p: Profile, name: str, section: dict[str, Any]) -> Need:
    """About: a causal training of as many of the verifier's layers."""
    t = training_of(p.name, "baselines", name, "training")
    shape = p.verifier.cut(decoding.baseline_layers(section))
    words = min(section.get("draft_vocab", shape.vocab), shape.vocab)
    return needs.training(p, f"baselines {name}", t, shape, words=words, prefix="causal", kept=False)
