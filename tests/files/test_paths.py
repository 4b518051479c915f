"""Only run_folder.py knows what lies where in a run's folder."""

import ast
import re
from pathlib import Path

import pytest

import drumline
from drumline.files.run_folder import RunFolder
from drumline.files.runs import run_of

SOURCE = Path(drumline.__file__).parent
ELSEWHERE = {
    "data/tokens.py": {"tokenizer.json"},  # of prepared data
    "encoding/journal.py": {".lock"},  # of data that are being prepared
}
NAMES = {path.name for path in vars(RunFolder(Path("run"))).values() if isinstance(path, Path)} - {"run", "tensorboard"}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "files/run_folder.py")


def names_in(source: str) -> set[str]:
    """Names of a run's folder in strings that are paths: of one word, and not documentation."""
    tree = ast.parse(source)
    joined = {id(node.right) for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value):
            words = node.value.split("/")
            is_path = len(words) > 1 or id(node) in joined or "." in node.value
            names |= NAMES.intersection(words) if is_path else set()
    return names


def test_names_of_a_run_folder_are_recognised_in_paths() -> None:
    assert {"config.toml", "checkpoints", ".lock", ".leader", ".id", "status.json", "metrics.jsonl"} <= NAMES
    assert names_in('run / "checkpoints"') == {"checkpoints"} and names_in('glob("*/config.toml")') == {"config.toml"}
    assert names_in('f"{run}/status.json"') == {"status.json"} and names_in('Path(".lock")') == {".lock"}
    assert names_in('"""See config.toml."""\nfix = "its config.toml has them"\nroom("checkpoints")') == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_path_in_a_run_folder_comes_from_the_run_folder(path: Path) -> None:
    allowed = ELSEWHERE.get(str(path.relative_to(SOURCE)), set())
    assert names_in(path.read_text(encoding="utf-8")) <= allowed


def test_a_run_or_a_checkpoint_of_it_names_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.checkpoint(4).mkdir(parents=True)
    assert run_of(folder.path).path == run_of(folder.checkpoint(4)).path == folder.path
    assert run_of(Path("4")).path == Path("4")
