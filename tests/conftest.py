"""Tests run side by side, one thread each: a whole file in one process, and what shares the smoke run in another."""

import os

import pytest

# Before torch is imported: threads of several processes starve one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shared = [name for name in ("smoke", "finished") if name in getattr(item, "fixturenames", ())]
        item.add_marker(pytest.mark.xdist_group(shared[0] if shared else item.path.stem))
    # What takes longest starts first: the smoke run, then the other runs of dvc.
    items.sort(key=lambda item: ("smoke" not in getattr(item, "fixturenames", ()), item.path.parent.name != "pipeline"))
