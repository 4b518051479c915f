"""The documents' commands work as they stand (long runs shrunk), and both languages say the same."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.small import small
from helpers.warm import run_warm, warm_programs

ROOT = Path(__file__).parent.parent
README, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
BIN = Path(sys.executable).parent
MODULES = {"drumline": "drumline", "torchrun": "torch.distributed.run"}
"""What is behind a command."""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    return [line for block in blocks(text, "bash") for line in block.splitlines() if line and not line.startswith("#")]


def test_both_languages_have_the_same_commands_code_and_links() -> None:
    assert blocks(README, "bash") == blocks(CHINESE, "bash") and blocks(README, "python") == blocks(CHINESE, "python")
    assert re.findall(r"^#+", README, re.M) == re.findall(r"^#+", CHINESE, re.M)
    links = [re.findall(r"\]\(([^)]+)\)", text) for text in (README, CHINESE)]
    plain = [sorted(link.replace(".zh-CN", "") for link in each) for each in links]
    assert plain[0] == plain[1]
    for link in {*links[0], *links[1]}:
        assert (ROOT / link).exists(), link


@pytest.mark.long
def test_the_guide_to_ranks_works_as_it_says_in_both_languages(text: Path, tmp_path: Path) -> None:
    guides = [(ROOT / f"docs/distributed{language}.md").read_text(encoding="utf-8") for language in ("", ".zh-CN")]
    scripts = blocks(guides[0], "bash test")
    assert len(scripts) >= 2 and scripts == blocks(guides[1], "bash test")
    programs = warm_programs(tmp_path / "programs")
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for script in scripts:
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=180
        )
        assert done.returncode == 0, f"{script}\n{done.stderr}"


@pytest.mark.parametrize("document", sorted(ROOT.glob("docs/*.md")), ids=lambda path: path.name)
def test_links_of_the_guides_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert link.startswith("http") or (document.parent / link).exists(), link


def shrunk(command: str) -> list[str]:
    """A command of the README with a model and a length that take no time."""
    words = shlex.split(command)
    if "launch" in words:
        more = ["--dry_run", *(["--ssh", "sh"] if "--hosts" in words else [])]  # its hosts and its ssh are the reader's
        words[words.index("launch") + 1 : words.index("launch") + 1] = more
    elif "train" in words and "--dry_run" not in words and "--run_dir" not in words:
        start = words.index("train") + 1
        given = [word for word in words[start:] if word.startswith("--")]
        words = words[:start] + small(*words[start:])
        for flag, least in (("--minutes", "0.005"), ("--total_steps", "6")):
            words += [flag, least] if flag in given else []
        if "--train_data_path" not in given:
            words += ["--train_data_path", "text"]
    if "doctor" in words:
        words.append("--quick")
    if "drill" in words:
        words = [*words[: words.index("--minutes")], "--minutes", "0.01", "--faults", "nan"]
    assert (BIN / words[0]).exists()
    return [sys.executable, "-m", MODULES[words[0]], *words[1:]]


@pytest.mark.needs_shm
@pytest.mark.long
def test_the_readmes_commands_work_in_the_order_they_stand(text: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ran = 0
    for command in commands(README):
        if command.startswith("make "):
            continue  # what they run is in the Makefile test
        done = run_warm(shrunk(command), cwd=tmp_path, env=environ, timeout=180)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        ran += 1
    assert ran >= 9
    (code,) = blocks(README, "python")
    done = run_warm([sys.executable, "-c", code], cwd=tmp_path, env=environ, timeout=180)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/linear/status.json").exists()


def test_make_knows_the_readmes_targets() -> None:
    for target, runs in (("train", "drumline train"), ("test", "-m pytest")):
        plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert runs in plan
    assert "make test" in (ROOT / ".ci/run").read_text()


GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("flags", re.findall(r"^    drumline train (.*)$", GUIDE, re.M))
def test_what_the_contributing_guide_adds_trains(flags: str, text: Path, tmp_path: Path) -> None:
    for code in blocks(GUIDE, "python"):
        name = re.match(r"# (\w+\.py)", code)
        assert name is not None
        (tmp_path / name[1]).write_text(code)
    words = [*small(*flags.split(), "--run_dir", "run")]
    if "--train_data_path" not in words:
        words += ["--train_data_path", "text"]
    done = run_warm([sys.executable, "-m", "drumline", "train", *words], cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    if "--sink" in words:
        assert len((tmp_path / "run/losses.csv").read_text().splitlines()) == 6
    if "--model" in words:
        assert "sample:" in done.stdout
        sample = [sys.executable, "-m", "drumline", "sample", "run", "--prompt", "Once", "--max_tokens", "5"]
        written = run_warm(sample, cwd=tmp_path, timeout=180)
        assert written.returncode == 0 and "Once" in written.stdout, written.stderr


def test_the_contributing_guide_adds_a_model_an_optimizer_a_source_and_a_sink() -> None:
    lines = re.findall(r"^    drumline train --(\w+) my_\w+:\w+", GUIDE, re.M)
    assert lines == ["model", "optimizer", "train_data_path", "sink"]
