"""Data sets of the Hugging Face hub, by name and as local folders in its layout. Nothing here uses a network."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drumline.data import other_sources, sources
from drumline.data.other_sources import articles
from drumline.data.sources import Document, Reading, has_split, source_bytes, source_key
from drumline.errors import DataError, MissingExtraError

WIKITEXT_ROWS = ["", " = One = \n", "", " First . \n", " = = Part = = \n", " more \n", " = Two = \n", " = x \n"]
ARTICLES = [" = One = \n First . \n = = Part = = \n more \n", " = Two = \n = x \n"]


@pytest.fixture(autouse=True)
def unreachable_hub(monkeypatch):
    """A port that nobody listens on."""
    import datasets  # which takes seconds: not in a test that counts them  # noqa: F401

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def asked(monkeypatch):
    """What `datasets.load_dataset` is asked for; it answers with WikiText rows."""
    import datasets

    calls: list[Any] = []

    def load_dataset(*names: str | None, **options: Any) -> Any:
        calls.append((*names, options))
        return datasets.Dataset.from_dict({"id": list(range(8)), "text": WIKITEXT_ROWS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def shard(folder: Path, split: str, rows: list[str], *, number: int = 0, of: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}-{number:05d}-of-{of:05d}.parquet"
    pq.write_table(pa.table({"text": rows}), path)
    return path


def documents(source: Path | str, *, split: str = "train", **options: Any) -> Iterator[Document]:
    return sources.documents(str(source), Reading(**options), split=split)


def texts(source: Path | str, **options: Any) -> list[str]:
    return [document.text for document in documents(source, **options)]


def refused(source: Path | str, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        texts(source, **options)
    return caught.value


@pytest.mark.parametrize("below", ["", "data", "my-config"])
def test_a_folder_in_the_hubs_layout_gives_the_files_of_the_asked_split(tmp_path, below):
    second = shard(tmp_path / below, "train", ["c"], number=1, of=2)
    first = shard(tmp_path / below, "train", ["a", "b"], of=2)
    held_out = shard(tmp_path / below, "validation", ["v"])
    (tmp_path / "README.md").write_text("not a document")
    assert texts(tmp_path) == ["a", "b", "c"]
    assert list(documents(str(tmp_path), split="validation")) == [Document(f"{held_out}:row 1", "v")]
    assert source_bytes(str(tmp_path)) == first.stat().st_size + second.stat().st_size
    assert [has_split(str(tmp_path), split) for split in ("train", "validation", "test")] == [True, True, False]
    assert "has no split 'test', only: train, validation" in refused(tmp_path, split="test").problem


def test_a_folder_of_several_data_sets_asks_which_one(tmp_path):
    for config in ("wikitext-2-v1", "wikitext-103-v1"):
        shard(tmp_path / config, "train", ["a"])
    error = refused(tmp_path)
    assert "contains 2 datasets: wikitext-103-v1, wikitext-2-v1" in error.problem
    assert error.fix == f"choose one of them: {tmp_path}/wikitext-103-v1"


@pytest.mark.parametrize("place", ["wikitext-2/data", "wikitext-2", "copy/wikitext-2-raw-v1"])
def test_a_local_wikitext_gives_articles_even_across_files(tmp_path, place):
    shard(tmp_path / place, "train", WIKITEXT_ROWS[:5], of=2)
    shard(tmp_path / place, "train", WIKITEXT_ROWS[5:], number=1, of=2)
    assert texts(tmp_path / place.split("/")[0]) == ARTICLES


def test_rows_without_titles_do_not_become_one_endless_article():
    rows = [Document(str(number), "x" * 300_000) for number in range(10)]
    joined = list(articles(rows))
    assert "".join(article.text for article in joined) == "x" * 3_000_000
    assert [article.name for article in joined] == ["0", "4", "8"]


@pytest.mark.parametrize(
    ("source", "name", "config"),
    [
        ("wikitext-2", "Salesforce/wikitext", "wikitext-2-raw-v1"),
        ("wikitext-2-raw-v1", "Salesforce/wikitext", "wikitext-2-raw-v1"),
        ("wikitext-103", "Salesforce/wikitext", "wikitext-103-raw-v1"),
        ("wikitext-103-raw-v1", "Salesforce/wikitext", "wikitext-103-raw-v1"),
        ("wikitext-103-v1", "Salesforce/wikitext", "wikitext-103-v1"),
        ("Salesforce/wikitext:wikitext-2-v1", "Salesforce/wikitext", "wikitext-2-v1"),
    ],
)
def test_a_wikitext_name_gives_articles_of_the_right_configuration(asked, source, name, config):
    assert all(has_split(source, split) for split in ("train", "validation", "test"))
    assert source_key(source) == f"hub {name}:{config}" and source_bytes(source) is None
    assert asked == []
    articles = list(documents(source, split="validation"))
    assert articles == [
        Document(f"{source}/validation:2", ARTICLES[0]),
        Document(f"{source}/validation:7", ARTICLES[1]),
    ]
    assert asked == [(name, config, {"split": "validation", "streaming": False})]


@pytest.mark.parametrize(
    ("source", "name", "config"), [("me/my-set.v2", "me/my-set.v2", None), ("me/set:en", "me/set", "en")]
)
def test_any_other_hub_name_gives_one_document_per_row(asked, source, name, config):
    assert texts(source) == [row for row in WIKITEXT_ROWS if row]
    assert asked == [(name, config, {"split": "train", "streaming": False})]
    assert not has_split(source, "validation")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that answers: a name is a folder here, read by the package itself; the folder of me/set."""
    import datasets

    load = datasets.load_dataset

    def load_dataset(name: str, config: str | None, **options: Any) -> Any:
        return load(str(tmp_path / name), config, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(other_sources, "_hub_answers", lambda: True)
    return tmp_path / "me" / "set"


def test_what_is_streamed_are_the_documents_of_the_downloaded_data_set(hub, monkeypatch, tmp_path):
    for number in range(3):
        shard(hub, "train", [f"row {number} {row}" for row in range(300)], number=number, of=3)
    streamed = list(documents("me/set"))
    assert not list(tmp_path.rglob("*.arrow")), "nothing is kept on disk"
    monkeypatch.setattr(other_sources, "_hub_answers", lambda: False)
    assert streamed == list(documents("me/set")) and len(streamed) == 900
    assert streamed[300] == Document("me/set/train:301", "row 1 0")


def test_the_first_documents_do_not_wait_for_a_download_of_the_rest(hub):
    shard(hub, "train", ["a"] * 300, of=2)
    shard(hub, "train", ["c"], number=1, of=2).write_bytes(b"not parquet")
    coming = documents("me/set")
    assert next(coming).text == "a"
    with pytest.raises(DataError, match=r"me/set/train cannot be read after row 256: ") as caught:
        list(coming)
    assert "run the same command again" in caught.value.fix


def test_a_streamed_data_set_without_the_field_names_its_fields(hub):
    shard(hub, "train", ["a"])
    assert refused("me/set", field="content").problem == "me/set/train has no field 'content'; it has: text"


def test_a_hub_data_set_without_the_field_names_its_fields(asked):
    error = refused("me/set", field="content")
    assert error.problem == "me/set/train has no field 'content'; it has: id, text"
    assert "--field NAME" in error.fix


def test_an_existing_folder_comes_before_a_hub_name(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    for source in ("me/set", "wikitext-2"):
        shard(tmp_path / source, "train", ["local"])
        assert texts(source) == ["local"]
    assert asked == []


@pytest.mark.parametrize("source", ["wikitext-2", "me/a-set-that-nobody-has"])
def test_an_unreachable_hub_is_reported_within_seconds_with_the_way_to_a_local_copy(source):
    started = time.monotonic()
    error = refused(source)
    assert time.monotonic() - started < 6
    assert "Hub (http://127.0.0.1:9) cannot be reached" in error.problem
    assert "folder of parquet files" in error.fix and "--train_data_path" in error.fix
    assert not sys.modules["datasets"].config.HF_HUB_OFFLINE


def test_a_data_set_that_cannot_be_loaded_says_why(monkeypatch):
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ValueError('Unknown split "valid". Use "train".\nmore')

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    error = refused("me/set:en", split="valid")
    assert error.problem.endswith("""me/set:en, split 'valid', cannot be loaded: Unknown split "valid". Use "train".""")
    assert "OWNER/NAME:CONFIG" in error.fix


@pytest.mark.parametrize(("package", "source"), [("datasets", "wikitext-2"), ("pyarrow", "a.parquet")])
def test_a_missing_package_is_answered_with_the_pip_command(tmp_path, monkeypatch, package, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as caught:
        texts(source)
    assert caught.value.fix == "pip install 'drumline[datasets]'"
