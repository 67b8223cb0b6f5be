"""What several files of tests look at is made once in each process."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report with a study in it, to look at and not to change."""
    from tests.stages import reporting  # late: brings pandas and matplotlib

    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(reporting.stage, "studies", reporting.study)
        reporting.set_up(folder)
        return (folder / reporting.make()).resolve()
