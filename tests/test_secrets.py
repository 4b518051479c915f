"""Secrets in the environment stay there: no file and no line of a run holds one."""

import os
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.small import small
from helpers.warm import run_warm

# As long as W&B wants a key to be, or it would not take it.
_SECRETS = {
    name: f"canary{number}".ljust(40, "7")
    for number, name in enumerate(
        ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "DRUMLINE_SECRET")
    )
}
_NO_SERVER = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_ERROR_REPORTING": "false"}  # nothing answers there
_TRACKERS = [
    *(["--tensorboard"] if find_spec("tensorboard") else []),
    *(["--use_wandb"] if find_spec("wandb") else []),
]
_LEAKY = """
import os, sys
from drumline.report.records import Records
real = Records.say
def say(self, message):
    real(self, message + os.environ["HF_TOKEN"])
Records.say = say
from drumline.cli.app import main
sys.argv[0] = "drumline"
sys.exit(main())
"""


def run(where: Path, *flags: str, code: str | None = None) -> dict[str, bytes]:
    """Train with secrets in the environment; all that could show them: stdout, stderr and every file, by name."""
    home = where / "home"
    home.mkdir()
    ours = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ = {**ours, **_SECRETS, **_NO_SERVER, "HOME": str(home), "TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
    start = ["-c", code] if code else ["-m", "drumline"]
    command = [sys.executable, *start, "train", *small("--train_data_path", "text", "--run_dir", "run", *flags)]
    done = run_warm(command, cwd=where, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr
    files = {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*") if path.is_file()}
    assert {"run/metrics.jsonl", "run/train.log", "run/config.toml", "run/status.json"} <= set(files)
    return {"stdout": done.stdout.encode(), "stderr": done.stderr.encode(), **files, **_unpacked(where)}


def _unpacked(where: Path) -> dict[str, bytes]:
    """What lies inside zip files."""
    inside: dict[str, bytes] = {}
    for path in where.rglob("*"):
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                inside |= {f"{path}:{name}": archive.read(name) for name in archive.namelist()}
    return inside


def leaks(shown: dict[str, bytes]) -> list[tuple[str, str]]:
    """Where each secret is seen, as it is or a part of it long enough to matter, in any common encoding of text."""
    places = []
    for where, content in shown.items():
        for name, secret in _SECRETS.items():
            if any(secret[:12].encode(code) in content for code in ("utf-8", "utf-16-le")):
                places.append((name, where))
    return places


@pytest.mark.parametrize("flags", [["--nproc", "1", *_TRACKERS], ["--nproc", "2"]], ids=["trackers", "two-ranks"])
def test_no_secret_of_the_environment_is_in_any_file_or_line_of_a_run(
    tmp_path: Path, text: Path, flags: list[str]
) -> None:
    shown = run(tmp_path, *flags)
    assert leaks(shown) == []
    if "--tensorboard" in flags:
        assert any("tfevents" in name for name in shown)
    if "--use_wandb" in flags:
        (kept,) = (content for name, content in shown.items() if name.endswith(".wandb"))
        assert b"total_steps" in kept  # the config is there
        assert b"--train_data_path" not in kept  # the command line, which may hold anything, is not


def test_the_search_sees_a_secret_that_is_said(tmp_path: Path, text: Path) -> None:
    places = {place for name, place in leaks(run(tmp_path, code=_LEAKY)) if name == "HF_TOKEN"}
    assert places == {"stdout", "run/train.log"}


def test_the_search_sees_a_secret_inside_an_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", 9 * _SECRETS["MY_PASSWORD"])
    assert leaks({"packed": (tmp_path / "a.zip").read_bytes()}) == []
    assert leaks(_unpacked(tmp_path)) == [("MY_PASSWORD", f"{tmp_path / 'a.zip'}:inside")]
