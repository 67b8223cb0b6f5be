"""Prompts that are computed: reasoning-gym datasets with checked answers, and short ones made on the spot.

gsm_symbolic (arXiv 2410.05229) draws each problem from one of its templates, 85 of which reasoning-gym
0.1.25 accepts. Held-out templates never enter the training corpus, so a split over them asks for more than
new numbers.
"""

from collections.abc import Callable, Sequence
from random import Random

from stages.download.items import Item
from stages.download.params import Generator, Made

TEMPLATED = "gsm_symbolic"


def from_generator(source: Generator, *, held_out: Sequence[int]) -> list[Item]:
    """Items of a reasoning-gym dataset, by template where it has templates."""
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(source.dataset, seed=source.seed, size=source.size, **source.options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"reasoning-gym: dataset {source.dataset!r}: {error}; correct `dataset` or `options`"
        ) from None
    if source.dataset == TEMPLATED:
        templates: list[int] = vars(dataset)["task_indices"]
        _check_templates(held_out)
    elif source.templates != "all":
        raise ValueError(f"reasoning-gym: {source.dataset!r} has no templates; write `templates: all`")
    else:
        templates = []
    items: list[Item] = []
    for index in range(source.size):
        if templates and not _wanted(templates[index], source.templates, held_out):
            continue
        entry = dataset[index]
        category = f"template_{templates[index]:02d}" if templates else source.dataset
        text = entry["question"].removesuffix(source.without)
        items.append(Item(f"{source.dataset}-{source.seed}-{index}", text, str(entry["answer"]), category))
    if not items:
        raise ValueError(
            f"reasoning-gym: {source.dataset!r}, seed {source.seed}, size {source.size}: no item with "
            f"`templates: {source.templates}`; raise `size` or change held_out_templates"
        )
    return items


def _wanted(template: int, which: str, held_out: Sequence[int]) -> bool:
    return which == "all" or (template in held_out) == (which == "held_out")


def _check_templates(held_out: Sequence[int]) -> None:
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok

    if unknown := sorted(set(held_out) - set(tasks_ok)):
        raise ValueError(f"download.held_out_templates: {unknown} are no templates; known: {tasks_ok}")


COLOURS = ("red", "green", "blue", "grey", "black", "white", "brown", "golden")
ANIMALS = ("cats", "dogs", "birds", "fish", "horses", "mice", "bears", "foxes")


def from_made(source: Made) -> list[Item]:
    """`size` prompts of one kind, numbers and words drawn from the seed."""
    random = Random(source.seed)
    make = _MAKERS[source.kind]
    return [Item(f"{source.kind}-{source.seed}-{index}", *make(random), source.kind) for index in range(source.size)]


def _sum(random: Random) -> tuple[str, str | None]:
    a, b = random.randint(100, 999), random.randint(100, 999)
    return f"What is {a} plus {b}?", str(a + b)


def _difference(random: Random) -> tuple[str, str | None]:
    a, b = random.randint(500, 999), random.randint(100, 499)
    return f"Take {b} away from {a}.", str(a - b)


def _code(random: Random) -> tuple[str, str | None]:
    n = random.randint(100, 999)
    return f'def add_{n}(x):\n    """Return x plus {n}."""\n', None


def _open(random: Random) -> tuple[str, str | None]:
    return f"Tell me about {random.choice(COLOURS)} {random.choice(ANIMALS)}.", None


_MAKERS: dict[str, Callable[[Random], tuple[str, str | None]]] = {
    "sum": _sum,
    "difference": _difference,
    "code": _code,
    "open": _open,
}
