"""A run folder from elsewhere runs no code that its user does not know or trust."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline import plugins
from drumline.cli.app import run_command
from drumline.files.trust import _file, check_code

Train = Callable[..., int]
MODULE = """
import pathlib, torch
from drumline.model.gpt import GPT
pathlib.Path(RAN).touch()

def model(config): return GPT(config)
def optimizer(model, settings): return torch.optim.SGD(model.parameters(), lr=0.1)
def source():
    for number in range(60):
        yield f"Once upon a time there were {number} drums. " * 5
class Sink:
    def __init__(self, folder): pass
    def write(self, record): pass
    def close(self): pass
"""
NAMES = {"model": "model", "optimizer": "optimizer", "train_data_path": "source", "sink": "Sink"}
NUMBER = iter(range(1000))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a name of its own, in the current folder."""
    name = f"my_code_{os.getpid()}_{next(NUMBER)}"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / f"{name}.py").write_text(MODULE.replace("RAN", repr(str(tmp_path / "ran"))))
    return name


@pytest.fixture
def forget(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets this be another user's machine, who has not run the module."""

    def forgets() -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of another"))
        (tmp_path / "ran").unlink(missing_ok=True)
        sys.modules.pop(module, None)

    return forgets


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("my_code_"):
            del sys.modules[name]


def commands(run: str) -> Iterator[list[str]]:
    yield ["train", "--run_dir", run, "--allow_change", "total_steps", "--total_steps", "4"]
    yield ["train", "--config", f"{run}/config.toml", "--run_dir", "new"]
    yield ["train", "--resume_from", run, "--run_dir", "new"]


@pytest.mark.parametrize("setting", NAMES)
def test_a_run_from_elsewhere_runs_no_code_and_says_what_it_wanted(
    train: Train, module: str, forget: Callable[[], None], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = f"{module}:{NAMES[setting]}"
    assert train(f"--{setting}", value, "--run_dir", "run", "--total_steps", "2") == 0
    forget()
    words = [*commands("run"), *([["evaluate", "run"]] if setting in ("model", "train_data_path") else [])]
    for each in [*words, *([["sample", "run", "--max_tokens", "2"]] if setting == "model" else [])]:
        for trust in ([], ["--trust"]):
            capsys.readouterr()
            assert run_command([*each, *trust]) == 1
            error, fix = capsys.readouterr().err.splitlines()
            assert f"{setting} {value}, in {Path.cwd()}/{module}.py" in error and "--trust" in fix
            assert ("not installed" if trust else "not used here before") in error
    assert not Path("ran").exists() and not Path("new").exists()
    again = ["train", "--run_dir", "run", "--allow_change", "total_steps", "--total_steps", "3", f"--{setting}", value]
    assert run_command(again) == 0  # named by the user
    assert Path("ran").exists() or setting == "train_data_path"  # whose tokens are there already
    assert run_command([*again[:-2], "--total_steps", "4"]) == 0  # and known from then on


def test_own_runs_go_on_without_a_word(
    train: Train, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [word for setting, name in NAMES.items() for word in (f"--{setting}", f"{module}:{name}")]
    assert train(*flags, "--run_dir", "runs/run", "--total_steps", "2") == 0
    assert (tmp_path / "state/drumline/plugins").stat().st_mode & 0o777 == 0o600
    for here in (tmp_path, tmp_path / "runs"):
        monkeypatch.chdir(here)
        for words in (*commands(str(tmp_path / "runs/run")), ["evaluate", str(tmp_path / "runs/run")]):
            assert run_command(words) == 0
    monkeypatch.chdir(tmp_path)
    assert run_command(["checkpoint", "export", "runs/run", "--out", "file.pt"]) == 0
    assert run_command(["sample", "file.pt", "--max_tokens", "2"]) == 0


def test_installed_code_runs_if_it_is_trusted_and_is_known_from_then_on(
    train: Train, module: str, forget: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("--model", f"{module}:model", "--run_dir", "run", "--total_steps", "2") == 0
    sample = ["sample", "run", "--max_tokens", "2"]
    forget()
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / f"{module}.py").write_text((tmp_path / f"{module}.py").read_text())
    monkeypatch.syspath_prepend(installed)
    sys.path[:] = [path for path in sys.path if path not in ("", str(tmp_path))]
    assert run_command([*sample, "--trust"]) == 1  # there is another one in this folder, which would come first
    (tmp_path / f"{module}.py").unlink()
    assert run_command(sample) == 1
    assert not Path("ran").exists()
    assert run_command([*sample, "--trust"]) == 0
    assert run_command(sample) == 0


def test_a_config_file_of_the_users_own_may_name_code(train: Train, module: str) -> None:
    Path("mine.toml").write_text(f'model = "{module}:model"\n')
    assert train("--config", "mine.toml", "--run_dir", "run", "--total_steps", "2") == 0


def test_to_look_for_a_module_runs_nothing(tmp_path: Path, module: str) -> None:
    package = tmp_path / f"{module}_package"
    (package / "inner").mkdir(parents=True)
    for path in (package / "__init__.py", package / "inner/__init__.py", package / "inner/code.py"):
        path.write_text("raise AssertionError")
    assert _file(f"{package.name}.inner.code", [str(tmp_path)]) == str(package / "inner/code.py")
    assert _file(f"{package.name}.inner", [str(tmp_path)]) == str(package / "inner/__init__.py")
    assert (
        _file(f"{package.name}.other", [str(tmp_path)]) is None and _file("no_such_module.x", [str(tmp_path)]) is None
    )
    assert _file(f"{module}.x", [str(tmp_path)]) is None and _file("sys", []) == "built-in"


def test_what_others_could_have_written_is_not_believed(tmp_path: Path, module: str, train: Train) -> None:
    assert train("--model", f"{module}:model", "--run_dir", "run", "--total_steps", "2") == 0
    used, known = tmp_path / "state/drumline/plugins", (f"{module}:model", str(tmp_path / f"{module}.py"))
    assert plugins.was_used(*known) and not plugins.was_used(known[0], str(tmp_path / "other.py"))
    used.chmod(0o622)
    assert not plugins.was_used(*known)
    used.chmod(0o600)
    used.rename(tmp_path / "elsewhere")
    used.symlink_to(tmp_path / "elsewhere")
    assert not plugins.was_used(*known)


def test_a_run_from_elsewhere_uploads_to_no_store_that_its_user_does_not_know(
    train: Train, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "run", "--total_steps", "2") == 0
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace("[run]\n", '[run]\ncheckpoint_store = "s3://strangers/bucket"\n'))
    words = ("--run_dir", "run", "--total_steps", "3", "--allow_change", "total_steps")
    capsys.readouterr()
    assert train(*words) == 1
    error, fix = capsys.readouterr().err.splitlines()
    assert error.startswith("error: run would upload its checkpoints to s3://strangers/bucket, a store that you have ")
    assert fix == "  fix: if that is yours, name it yourself: --checkpoint_store s3://strangers/bucket"
    settings = {"checkpoint_store": "s3://strangers/bucket"}
    for more in ({"named": ["s3://strangers/bucket"]}, {"trusts": True}):
        check_code(settings, tmp_path / "run", **{"trusts": False, **more})
    plugins.remember("s3://strangers/bucket", None)
    check_code(settings, tmp_path / "run", trusts=False)
    assert train("--run_dir", "new", "--resume_from", "run", *words[2:]) == 0  # a run of its own uploads nothing
