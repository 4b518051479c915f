"""Where there is no ssh, a script takes its place: most tests only write down how it would be called."""

import os
import shutil
from pathlib import Path

import pytest
from helpers.ssh_plans import script


@pytest.fixture(autouse=True)
def some_ssh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("ssh") is None:
        folder: Path = tmp_path_factory.mktemp("bin")
        script(folder / "ssh", "#!/bin/sh\nexit 255\n")
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{folder}")
