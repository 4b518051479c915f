"""Documents name what is there and say the same in both languages; the picture of the rooms is what the code draws."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from drumline.lazy import public_names

ROOT = Path(__file__).parent.parent
PLACES = [ROOT / "src/drumline", ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "examples"]
"""What paths in the documents are relative to."""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/README*.md")])
OF_READERS = {"mlp.py", "work.py"}
"""Files that the documents let their readers write."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_and_name_that_a_document_mentions_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    mentioned = re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)(?::(\w+))?`", text)
    if document.name.startswith("architecture"):
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


ENGLISH_ONLY = {ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"}
"""A list of changes and a log of measurements: they grow at one end, and little of them is prose."""
ENGLISH = [path for path in DOCUMENTS if not path.name.endswith(".zh-CN.md") and path not in ENGLISH_ONLY]


def in_chinese(document: Path) -> Path:
    return document.with_name(f"{document.stem}.zh-CN.md")


def outline(text: str) -> list[dict[str, Any]]:
    """What each section has in any language: code without comments, output, tables, links, names and figures."""
    sections: list[dict[str, Any]] = []
    fences = r"^```.*?^```$"
    parts = re.split(rf"({fences})|^(?=#+ )", text, flags=re.M | re.S)
    for part in filter(None, parts):
        heading = re.match(r"#+ ", part)
        if heading or not sections:
            sections.append({"level": heading and heading[0], "code": [], "output": [], "tables": [], "prose": ""})
        if part.startswith("```"):
            sections[-1]["code"] += filter(None, re.sub(r"(^|\s)# .*", "", part, flags=re.M).splitlines())
        else:
            sections[-1]["prose"] += part
    for section in sections:
        lines = section.pop("prose").splitlines()
        section["output"] = [line.strip() for line in lines if line.startswith("    ")]
        section["tables"] = [line.count("|") for line in lines if line.startswith("|")]
        prose = "\n".join(line for line in lines if not line.startswith("    "))
        section["links"] = sorted(re.findall(r"\]\(([^)]+)\)", prose))
        prose = re.sub(r"\]\([^)]+\)", "]", prose)
        section["names"] = sorted({re.sub(r"\s+", " ", name) for name in re.findall(r"`([^`]+)`", prose)})
        section["figures"] = sorted(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"`[^`]+`", "", prose)))
    return sections


def untranslated(line: str) -> list[str]:
    """Names of files and settings, and figures, in an indented line whose other words are translated."""
    return sorted(re.findall(r"[A-Za-z0-9/-]*[._/0-9][\w./-]*", line, re.A))


def anchors(document: Path) -> list[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def destination(link: str, document: Path) -> str:
    """Where a link leads, in words that are the same in both languages: the n-th heading of an English document."""
    path, _, anchor = link.partition("#")
    file = document.parent / path if path else document
    place = str(anchors(file).index(anchor)) if anchor else ""
    return f"{path.replace('.zh-CN', '')}#{place}"


@pytest.mark.parametrize("document", ENGLISH, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_document_says_the_same_in_chinese(document: Path) -> None:
    chinese = in_chinese(document)
    assert chinese.exists(), f"{document.name} has no Chinese version"
    texts = [path.read_text(encoding="utf-8") for path in (document, chinese)]
    outlines = [outline(text) for text in texts]
    levels = [[section["level"] for section in sections] for sections in outlines]
    assert levels[0] == levels[1], "other sections"
    top = [text.split("\n## ")[0] for text in texts]
    assert f"[中文]({chinese.name})" in top[0] and f"[English]({document.name})" in top[1]
    for number, (ours, theirs) in enumerate(zip(*outlines, strict=True)):
        for section, path in ((ours, document), (theirs, chinese)):
            links = [link for link in section["links"] if not link.startswith("http")]
            section["links"] = sorted(destination(link, path) for link in links)
        for place, line in enumerate(theirs["output"]):
            if re.search(r"[一-鿿]", line):
                theirs["output"][place], ours["output"][place] = untranslated(line), untranslated(ours["output"][place])
        assert theirs == ours, f"{chinese.name}, section {number}"


@pytest.mark.parametrize("document", ENGLISH, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_chinese_document_links_to_chinese_documents(document: Path) -> None:
    chinese = in_chinese(document)
    for link in re.findall(r"\]\(([^)#]+\.md)", chinese.read_text(encoding="utf-8")):
        target = chinese.parent / link
        assert link == document.name or target.name.endswith(".zh-CN.md") or not in_chinese(target).exists(), link


@pytest.mark.parametrize(
    "missing",
    ["## Two\n", "drumline runs\n", "| 1 | x |\n", " 42", " `--seed`", "    error: no\n", " [more](more.md)"],
)
def test_what_one_language_lacks_is_seen(missing: str) -> None:
    text = """# One
It takes 42 s, see [more](more.md).

```bash
drumline train  # this
drumline runs
```

    error: no

## Two
| a | b |
| --- | --- |
| 1 | x |

With `--seed` too.
"""
    assert outline(text) == outline(text.replace("# this", "# 这个"))
    assert missing in text and outline(text) != outline(text.replace(missing, ""))
