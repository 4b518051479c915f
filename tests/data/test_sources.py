"""What a source string means: files, folders, globs, the built-in corpus, functions; and what a wrong one is told."""

import gzip
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.reading import documents, refused, texts

from drumline.cli.app import run_command
from drumline.config import DataConfig
from drumline.data.corpus import Corpus
from drumline.data.other_sources import data_note
from drumline.data.sources import Document, Reading, Skipped, has_split, source_bytes, source_key
from drumline.errors import ConfigError


def tree(folder: Path, *paths: str) -> str:
    """A folder of files that each hold their own path."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return str(folder)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    return tmp_path


def test_a_folder_is_read_recursively_in_the_order_of_its_paths(tmp_path):
    source = tree(tmp_path, "b.md", "a/z.txt", "a/b/c.py", "c.RS")
    read_documents = list(documents(source))
    assert [document.text for document in read_documents] == ["a/b/c.py", "a/z.txt", "b.md", "c.RS"]
    assert read_documents[0].name == f"{source}/a/b/c.py"


def test_a_folder_gives_no_hidden_files_and_none_that_are_not_text_by_name(tmp_path):
    source = tree(tmp_path, "a.txt", ".b.txt", ".git/c.txt", "d.png", "e", "f.exe", "g.tar.gz")
    assert texts(source) == ["a.txt"]


def test_a_file_named_by_itself_is_read_whatever_its_suffix(tmp_path):
    tree(tmp_path, "notes", "a.weird", ".hidden/b.cfg")
    assert texts(str(tmp_path / "notes")) == ["notes"]
    assert texts(str(tmp_path / "a.weird")) == ["a.weird"]
    assert texts(str(tmp_path / ".hidden")) == [".hidden/b.cfg"]


def test_links_to_folders_are_followed_once_and_a_loop_of_links_ends(tmp_path):
    source = tree(tmp_path / "corpus", "a/b.txt")
    tree(tmp_path / "elsewhere", "c.txt")
    for link, target in (("a/loop", tmp_path / "corpus"), ("a/self", tmp_path / "corpus/a"), ("far", "../elsewhere")):
        (tmp_path / "corpus" / link).symlink_to(target)
    assert texts(source) == ["a/b.txt", "c.txt"]
    assert texts(f"{source}/**/*.txt") == ["a/b.txt"]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*.txt", ["b.txt"]),
        ("**/*.txt", ["a/c/d.txt", "a/z.txt", "b.txt"]),
        ("a/[yz].*", ["a/z.txt"]),
        ("a/**", ["a/c/d.txt", "a/x", "a/z.txt"]),
    ],
)
def test_a_glob_gives_the_files_it_matches_sorted(tmp_path, pattern, wanted):
    source = tree(tmp_path, "b.txt", "a/z.txt", "a/c/d.txt", "a/x", "a/.h.txt", ".a/i.txt")
    assert texts(f"{source}/{pattern}") == wanted


def test_a_file_whose_name_looks_like_a_glob_or_a_function_is_a_file(here):
    tree(here, "a[1].txt", "module:name")
    assert texts("a[1].txt") == ["a[1].txt"]
    assert texts("module:name") == ["module:name"]


def test_the_builtin_corpus_is_large_clean_and_the_same_each_time():
    corpus = list(documents("builtin"))
    names = [document.name for document in corpus]
    assert names == sorted(names, key=lambda name: name.split("/")) and "asyncio/events.py" in names
    assert not any({"test", "tests", "site-packages", "idle_test"} & set(name.split("/")) for name in names)
    if sys.version_info[:2] == (3, 11):
        assert sum(len(document.text.encode()) for document in corpus) > 9e6
    assert corpus == list(documents("builtin"))


def test_the_builtin_corpus_never_fails_on_a_file(tmp_path, monkeypatch):
    tree(tmp_path, "ast.py", "json/test/test_a.py", "encodings/cp1.py", "site-packages/x.py", "notes.txt")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    (tmp_path / "empty.py").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    skipped = Skipped()
    assert list(documents("builtin", skipped=skipped)) == [Document("ast.py", "ast.py")]
    assert skipped.count == 0


def test_a_function_gives_documents_and_strings(here):
    (here / "made.py").write_text(
        "from drumline.data.sources import Document\n"
        "def few():\n    yield 'one'\n    yield ''\n    yield Document('mine', 'three')\n"
        "def wrong():\n    yield 7\n    yield 'half \\ud800'\n    yield 'good'\n"
        "def whole():\n    return 'text'\n"
        "number = 7\n"
    )
    assert list(documents("made:few")) == [Document("made:few:1", "one"), Document("mine", "three")]
    assert "made:wrong:1: wrong yields int" in refused("made:wrong").problem
    assert texts("made:wrong", on_error="skip") == ["good"]
    assert refused("made:whole").problem == "made:whole() returns str, not an iterable of texts"
    for source, said in (
        ("made:number", "something that is not a function"),
        ("made:fewer", "did you mean made:few?"),
        ("unmade:few", "No module named 'unmade'"),
    ):
        with pytest.raises(ConfigError) as raised:
            texts(source)
        assert said in str(raised.value)


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("corpus/train.text", "did you mean corpus/train.txt?"),
        ("corpus/tran", "did you mean corpus/train.txt?"),
        ("corpsu", "did you mean corpus?"),
        ("bultin", "did you mean builtin?"),
        ("wikitext2", "did you mean wikitext-2"),
        ("nowhere/train.txt", "the folder nowhere does not exist; use a file"),
        ("far/from/here", "the folder far/from does not exist; use a file"),
        ("corpus/*.md", "try the pattern with ls"),
        ("corpus/**.md", "'data/**/*.txt'"),
        ("pictures", "use a glob: 'pictures/**/*.SUFFIX'"),
        ("", "use a file, a folder"),
    ],
)
def test_a_source_that_is_not_there_is_told_what_to_write_instead(here, source, fix):
    tree(here, "corpus/train.txt", "pictures/a.png")
    assert fix in refused(source).fix


@pytest.mark.parametrize(
    ("source", "shown", "fix"),
    [
        ("https://example.org/a.jsonl.gz?sig=secret", "https://example.org/a.jsonl.gz is a URL", "curl -LO"),
        ("s3://me:secret@bucket/text", "s3://bucket/text is a URL", "aws s3 cp --recursive s3://bucket/text text"),
        ("gs://bucket/*.jsonl", "gs://bucket/*.jsonl is a URL", "gcloud storage cp -r gs://bucket/*.jsonl text"),
        ("az://books/text", "az://books/text is a URL", "download-batch -s books -d text"),
        ("hf://datasets/OWNER/NAME@main/data", "is a URL", "use its name, which is streamed: OWNER/NAME"),
        ("hf://OWNER/NAME", "is a URL", "hf download OWNER/NAME"),
    ],
)
def test_text_behind_a_url_is_refused_with_the_command_that_copies_it(here, source, shown, fix, capsys):
    assert run_command(["prepare", source, "--out", "out"]) == 1
    error = capsys.readouterr().err
    assert shown in error and fix in error and "secret" not in error and error.count("\n") == 2
    assert list(here.iterdir()) == []


def test_a_source_without_any_document_is_refused_with_the_first_reason(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    assert refused(str(tmp_path)).problem == f"{tmp_path} contains no documents"
    (tmp_path / "b.jsonl").write_text("bad\n")
    problem = refused(str(tmp_path), on_error="skip").problem
    assert f"contains no documents; 1 skipped, first: {tmp_path}/b.jsonl:1 is not valid JSON" in problem


def test_a_folder_that_cannot_be_listed_is_refused_by_name(tmp_path, monkeypatch):
    source, closed = tree(tmp_path, "a.txt", "closed/b.txt"), str(tmp_path / "closed")
    scandir = os.scandir

    def guarded(path: str) -> Any:
        if str(path) == closed:
            raise PermissionError(13, "Permission denied", closed)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert refused(source).problem == f"{closed} cannot be listed: Permission denied"


def test_the_key_changes_when_what_would_be_read_changes_and_only_then(here, monkeypatch):
    source = tree(here / "corpus", "a.txt", "b.txt", "c.png")
    key = source_key(source)
    assert source_key("corpus") == key and len(key) < 200 + len(source)
    tree(here / "corpus", "c.png", "d.exe")
    assert source_key(source) == key
    os.utime(here / "corpus/a.txt", ns=(1, 1))
    touched = source_key(source)
    tree(here / "corpus", "e.txt")
    assert len({key, touched, source_key(source), source_key("corpus/*.txt"), source_key("corpus/a.txt")}) == 5

    tree(here, "edited.py")
    before = source_key("edited:few")
    (here / "edited.py").write_text("# longer than it was")
    assert source_key("edited:few") != before

    builtin = source_key("builtin")
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert "3.99.0" in source_key("builtin") and source_key("builtin") != builtin


def test_the_size_is_known_for_files_and_not_for_functions(tmp_path):
    source = tree(tmp_path, "a.txt", "b/c.txt", "d.png")
    assert source_bytes(source) == len("a.txt" + "b/c.txt")
    assert source_bytes("made:few") is None
    byte_counts: list[int] = []
    list(documents("builtin", on_bytes=byte_counts.append))
    assert sum(byte_counts) == source_bytes("builtin")


@pytest.mark.parametrize("source", ["corpus", "corpus/a.txt", "builtin", "json:dumps"])
def test_a_source_of_no_particular_split_is_all_train(here, source):
    tree(here, "corpus/a.txt")
    assert has_split(source, "train")
    assert not has_split(source, "validation")
    assert "has no split 'validation', only: train" in refused(source, split="validation").problem


@pytest.mark.parametrize(
    ("names", "train", "validation", "unused"),
    [
        ("train.txt valid.txt", "train.txt", "valid.txt", ""),
        ("a.txt b.md val.jsonl", "a.txt b.md", "val.jsonl", ""),
        ("Train.txt VALIDATION.txt.gz test.txt", "Train.txt", "VALIDATION.txt.gz", "test.txt"),
        ("train/a.txt valid/a.txt valid/b.txt test/c.txt", "train/a.txt", "valid/a.txt valid/b.txt", "test/c.txt"),
        ("train.txt test.txt", "train.txt", "", "test.txt"),
        ("x/train.txt x/val.txt y/val.txt", "x/train.txt y/val.txt", "x/val.txt", ""),
        ("s-train.txt s-valid.txt s-test.txt", "s-train.txt", "s-valid.txt", "s-test.txt"),
        ("train_01.txt train_02.txt validation_01.txt", "train_01.txt train_02.txt", "validation_01.txt", ""),
        (
            "src/a.py src/validation.py src/test/b.py test/c.py",
            "src/a.py src/test/b.py src/validation.py test/c.py",
            "",
            "",
        ),
        ("a.py test_a.py validation_of_forms.py", "a.py test_a.py validation_of_forms.py", "", ""),
        ("valid.txt", "valid.txt", "", ""),
    ],
)
def test_what_is_called_validation_is_never_trained_on_and_what_is_called_test_is_not_used(
    tmp_path, names, train, validation, unused
):
    folder = tree(tmp_path, *names.split())
    for path in tmp_path.rglob("*.gz"):
        path.write_bytes(gzip.compress(b"text"))
    for path in tmp_path.rglob("*.jsonl"):
        path.write_text('{"text": "text"}\n')

    def read(split):
        return [
            document.name.removeprefix(folder + "/").partition(":")[0] for document in documents(folder, split=split)
        ]

    assert read("train") == train.split()
    assert has_split(folder, "validation") is bool(validation)
    assert not validation or read("validation") == validation.split()
    note = data_note(DataConfig(train_data_path=folder))
    first = f"{validation.split()[0]} " if validation else ""
    assert (f"; {first}" in note and "held out for validation" in note) if validation else "validation" not in note
    assert f"; {unused} is not used" in note if unused else note.count(";") <= 1
    if " " in names and "/" not in names:
        assert has_split(f"{folder}/*", "validation") is bool(validation)


def test_validation_data_that_was_given_replaces_what_is_called_so_which_is_still_not_trained_on(tmp_path):
    folder, other = tree(tmp_path / "a", "train.txt", "valid.txt"), tree(tmp_path / "b", "mine.txt")
    corpus = Corpus(folder, valid_source=other)
    labelled = [(label, Path(each.name).name) for label, each in corpus.labelled(Reading(), cut_bytes=None)]
    assert labelled == [("train", "train.txt"), ("valid", "mine.txt")]
    assert data_note(DataConfig(train_data_path=folder, valid_data_path=other)) == (
        "; valid.txt is not used: --valid_data_path is"
    )


def test_a_name_that_begins_to_count_changes_the_key(tmp_path):
    folder = tree(tmp_path, "a.txt", "test.txt")
    keys = {source_key(folder)}
    os.rename(tmp_path / "a.txt", tmp_path / "train.txt")
    keys.add(source_key(folder))
    assert "by split" in source_key(folder) and len(keys) == 2
