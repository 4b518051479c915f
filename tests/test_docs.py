"""The documents name what is there, and the picture of the architecture is the one that the code draws."""

import importlib.util
import re
from pathlib import Path

import pytest

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
            found = re.search(rf"^(def|class) {name}\b|^{name}\b.* = ", there[0].read_text(encoding="utf-8"), re.M)
            assert found, f"{path} has no {name}"


def test_the_picture_of_the_architecture_is_what_the_code_draws() -> None:
    spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "docs/draw_architecture.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
    assert script.draw() == drawn, "the rooms changed: run python docs/draw_architecture.py"
