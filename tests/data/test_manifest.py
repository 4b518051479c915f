import json
import os
from pathlib import Path
from typing import Any

import pytest

from drumline.data.opening import open_tokens, read_manifest
from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import TOKENIZER, FileRecord, Manifest, TokenWriter, recorded
from drumline.errors import DataError
from drumline.files import verified

FILES = ("train.bin", "train.documents.bin", "train.names.txt", TOKENIZER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small prepared folder that nobody has opened yet."""
    tokenizer = Tokenizer.train(["the beat of the drum"], vocab_size=257)
    tokenizer.save(tmp_path / TOKENIZER)
    writer = TokenWriter(tmp_path, "train", vocab_size=257, end_of_text=0)
    writer.add("a", [1, 2, 3], text_bytes=3)
    record, files = writer.close(), recorded(writer.paths)
    files[TOKENIZER] = FileRecord(bytes=(tmp_path / TOKENIZER).stat().st_size, sha256=tokenizer.sha256)
    splits = {"train": record}
    Manifest(
        drumline_version="1",
        source="a test",
        source_key="s",
        key="k",
        vocab_size=257,
        end_of_text=0,
        splits=splits,
        files=files,
    ).write(tmp_path)
    return tmp_path


def change_manifest(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(content | changes))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def never_hash(*_: object, **__: object) -> None:
    raise AssertionError("hashed again")


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_one_flipped_bit_is_refused_by_name(folder: Path, name: str) -> None:
    flip_a_bit(folder / name)
    with pytest.raises(DataError, match=rf"{name} is (damaged or modified|not the tokenizer).*in its manifest"):
        open_tokens(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_length_is_refused_by_name(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for data, state in ((whole[:-1], "truncated"), (b"", "truncated"), (whole + b"x", "too long")):
        (folder / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name} is {state}: {len(data)} bytes, but {len(whole)} in"):
            open_tokens(folder)


def test_a_missing_file_is_refused_by_name(folder: Path) -> None:
    (folder / "train.bin").unlink()
    with pytest.raises(DataError, match=r"train\.bin is listed in its manifest but cannot be read"):
        open_tokens(folder)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    other = (folder / TOKENIZER).read_bytes().replace(b'"id": 0', b'"id": 1')
    (folder / TOKENIZER).write_bytes(other)
    with pytest.raises(DataError, match="not the tokenizer of these tokens"):
        open_tokens(folder)


def test_a_verified_folder_is_not_hashed_again_until_it_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_tokens(folder)
    with monkeypatch.context() as patch:
        patch.setattr(verified, "_hashed", never_hash)
        open_tokens(folder)
        later = (folder / "train.bin").stat().st_mtime_ns + 1
        os.utime(folder / "train.bin", ns=(later, later))
        with pytest.raises(AssertionError, match="hashed again"):
            open_tokens(folder)
    open_tokens(folder)
    flip_a_bit(folder / "train.bin")
    with pytest.raises(DataError, match="damaged or modified"):
        open_tokens(folder)


@pytest.mark.parametrize("stamps", [b"", b"[1]", b'"x"', b'{"train.bin": 5}'])
def test_a_damaged_record_of_what_was_verified_only_costs_another_hash(folder: Path, stamps: bytes) -> None:
    (folder / "verified.json").write_bytes(stamps)
    flip_a_bit(folder / "train.bin")
    with pytest.raises(DataError, match="damaged or modified"):
        open_tokens(folder)


def test_a_folder_that_cannot_be_written_can_still_be_opened(folder: Path) -> None:
    (folder / "verified.json").mkdir()  # permissions would not stop root
    before = sorted(folder.iterdir())
    assert len(open_tokens(folder)) == 4
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "is not the manifest of a prepared folder"),
        (b'{"format": "other"}', "is not the manifest of a prepared folder"),
        (b'{"format": "drumline-tokens", "format_version": 2}', "has format version 2, but this drumline reads"),
        (b'{"format": "drumline-tokens", "format_version": 1}', "is damaged: KeyError"),
    ],
)
def test_a_manifest_that_cannot_be_understood_is_refused_by_name(folder: Path, content: bytes, problem: str) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"manifest\.json {problem}"):
        open_tokens(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/train.bin", "..\\secret", "..", ""])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(folder: Path, name: str) -> None:
    files = json.loads((folder / "manifest.json").read_bytes())["files"]
    change_manifest(folder, files=files | {name: {"bytes": 1, "sha256": ""}})
    with pytest.raises(DataError, match="lists a file outside its folder"):
        read_manifest(folder)


@pytest.mark.parametrize("split", ["../train", "valid"])
def test_a_split_without_files_is_refused(folder: Path, split: str) -> None:
    change_manifest(folder, splits={split: {"tokens": 1, "documents": 1, "text_bytes": 1}})
    with pytest.raises(DataError, match="is damaged: it does not list"):
        open_tokens(folder, split=split)


@pytest.mark.parametrize("changes", [{"vocab_size": "many"}, {"splits": []}, {"files": {"train.bin": 3}}])
def test_a_manifest_with_values_of_the_wrong_kind_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    change_manifest(folder, **changes)
    with pytest.raises(DataError, match="is damaged"):
        open_tokens(folder)


def test_a_manifest_that_miscounts_its_tokens_is_refused(folder: Path) -> None:
    change_manifest(folder, splits={"train": {"tokens": 5, "documents": 1, "text_bytes": 1}})
    with pytest.raises(DataError, match=r"train\.bin has 8 bytes, which is not 5 items of 2"):
        open_tokens(folder)
