"""Documents, benchmarks and examples name what is there; the picture of the rooms is the one that the code draws."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from drumline.lazy import public_names

ROOT = Path(__file__).parent.parent
PLACES = [ROOT / "src/drumline", ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "examples"]
"""What paths in the documents are relative to."""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
OF_READERS = {"mlp.py", "work.py"}
"""Files that the documents let their readers write."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_and_name_that_a_document_mentions_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    mentioned = re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)(?::(\w+))?`", text)
    if document.name == "architecture.md":
        assert len(mentioned) > 60
    for path, name in mentioned:
        there = [place / path for place in PLACES if (place / path).exists()]
        assert there or path in OF_READERS, path
        if name:
            assert defines(there[0], name), f"{path} has no {name}"


def defines(module: Path, name: str) -> bool:
    return re.search(rf"^(def|class) {name}\b|^{name}\b.* = ", module.read_text(encoding="utf-8"), re.M) is not None


SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_benchmarks_and_examples_import_from_drumline_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drumline"):
            home = ROOT.joinpath("src", *str(node.module).split("."))
            for name in (alias.name for alias in node.names):
                if home.is_dir():
                    public = public_names((home / "__init__.py").read_text(encoding="utf-8"))
                    assert name in public or (home / f"{name}.py").exists(), f"{node.module}: {name}"
                else:
                    assert defines(home.with_suffix(".py"), name), f"{node.module}: {name}"


def test_the_picture_of_the_architecture_is_what_the_code_draws() -> None:
    spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "docs/draw_architecture.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
    assert script.draw() == drawn, "the rooms changed: run python docs/draw_architecture.py"
