"""Compressed text is unpacked once, to sample and to encode it; what is kept for that is bounded, checked, removed."""

import gzip
import io
import json
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.data import Corpus, Meter, Reading, Recipe, documents, preparing, structured_files
from drumline.data.sources import Document
from drumline.encoding import kept, parts, sampling, stretches, unpacking
from drumline.encoding.kept import Kept
from drumline.encoding.stretches import Stretches, in_stretches


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in (
        (unpacking, "LEAST_BYTES", 1000),
        (unpacking, "PIECE_BYTES", 3000),
        (kept, "PIECE_BYTES", 2000),
        (preparing, "FAST_BYTES", 1),
        (parts, "SAMPLE_BYTES", 20_000),
        (stretches, "STRETCH_BYTES", 20_000),
    ):
        monkeypatch.setattr(module, name, size)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Two files of rows, and a plain one."""
    folder, draw = tmp_path / "text", random.Random(0)
    folder.mkdir()
    for name in "ab":
        rows = [json.dumps({"text": f"the drum {draw.random()} é" * 9}) for _ in range(300)]
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (folder / "c.txt").write_text("the beat goes on " * 500)
    return folder


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are unpacked, each as often as that happens."""
    names: list[str] = []
    plain = structured_files._UNPACK[".gz"]

    class Counted(gzip.GzipFile):
        def readinto(self, *given: Any) -> int:
            if not self.tell():
                names.append(Path(self.fileobj.name).name)
            return super().readinto(*given)

        def read(self, *given: Any) -> bytes:
            if not self.tell():
                names.append(Path(self.fileobj.name).name)
            return super().read(*given)

    assert plain
    monkeypatch.setitem(structured_files._UNPACK, ".gz", lambda file: Counted(fileobj=file, mode="rb"))
    return names


def prepared(source: Path, out: Path, **how: Any) -> dict[str, bytes]:
    preparing.prepare(Recipe(Corpus(str(source), valid_fraction=0.1), None, 400), out, **how)
    assert not list(out.parent.glob(f"*{out.name}.p*"))
    return {path.name: path.read_bytes() for path in out.iterdir()}


def read(path: Path, store: Kept) -> Iterator[Document]:
    return documents(str(path), Reading(unpack=store.unpack))


def test_each_compressed_file_is_unpacked_once_with_the_same_bytes_out(
    tmp_path: Path, text: Path, unpacked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared(text, tmp_path / "out")
    assert sorted(unpacked) == ["a.jsonl.gz", "b.jsonl.gz"]
    with monkeypatch.context() as patch:
        patch.setattr(kept, "KEPT_BYTES", 0)
        assert prepared(text, tmp_path / "again") == found
    assert len(unpacked) > 4


@pytest.mark.parametrize("workers", [1, 3])
def test_a_single_text_whose_end_is_held_out_is_unpacked_once(
    tmp_path: Path, unpacked: list[str], workers: int
) -> None:
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(b"".join(b"the beat of drum %d " % number for number in range(3000))))
    found = prepared(path, tmp_path / "out", workers=workers)
    assert unpacked == ["x.txt.gz"]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "x.txt").write_bytes(gzip.decompress(path.read_bytes()))
    plain = prepared(tmp_path / "plain" / "x.txt", tmp_path / "other")
    assert all(found[name] == plain[name] for name in ("train.bin", "valid.bin", "tokenizer.json"))


def test_what_is_kept_has_a_limit_and_files_above_it_are_unpacked_again(
    tmp_path: Path, text: Path, unpacked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = len(gzip.decompress((text / "a.jsonl.gz").read_bytes()))
    monkeypatch.setattr(kept, "KEPT_BYTES", one + 5000)
    most = 0
    plain = Kept.write

    def measured(self: Kept, piece: bytearray) -> bool:
        nonlocal most
        fits = plain(self, piece)
        most = max(most, self._content.stat().st_size)
        return fits

    monkeypatch.setattr(Kept, "write", measured)
    prepared(text, tmp_path / "out")
    assert sorted(unpacked) == ["a.jsonl.gz", "b.jsonl.gz", "b.jsonl.gz"]
    assert one <= most <= one + 5000


def test_a_disk_with_little_room_keeps_a_quarter_of_it_and_a_full_one_nothing(
    tmp_path: Path, text: Path, unpacked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 8000))
        expected = prepared(text, tmp_path / "out")
    assert unpacked.count("a.jsonl.gz") == unpacked.count("b.jsonl.gz") == 2
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *how, **more: _opened(path, opened(path, *how, **more)))
    assert prepared(text, tmp_path / "other") == expected
    assert unpacked.count("a.jsonl.gz") == unpacked.count("b.jsonl.gz") == 4


def _opened(path: Path, file: Any) -> Any:
    return _Full(file.name, file.mode) if path.name == "unpacked.bin" else file


class _Full(io.FileIO):
    def write(self, content: Any) -> int:
        raise OSError(28, "No space left on device")


def test_what_is_damaged_on_the_disk_is_unpacked_again_from_there(tmp_path: Path, text: Path) -> None:
    store, path = Kept(tmp_path), text / "a.jsonl.gz"
    with store.keeping():
        expected = list(read(path, store))
    content = tmp_path / "unpacked.bin"
    assert content.stat().st_size == len(gzip.decompress(path.read_bytes()))
    for place in (0, 7000, content.stat().st_size - 1):
        data = bytearray(content.read_bytes())
        data[place] ^= 1
        content.write_bytes(data)
        assert list(read(path, Kept(tmp_path))) == expected
        data[place] ^= 1
        content.write_bytes(data)
    content.write_bytes(data[:9000])
    assert list(read(path, Kept(tmp_path))) == expected
    content.unlink()
    assert list(read(path, Kept(tmp_path))) == expected


def test_progress_through_what_is_kept_adds_up_to_the_size_of_the_compressed_file(tmp_path: Path, text: Path) -> None:
    store, path = Kept(tmp_path), text / "a.jsonl.gz"
    with store.keeping():
        list(read(path, store))
    counted: list[int] = []
    list(documents(str(path), Reading(unpack=store.unpack, on_bytes=counted.append)))
    assert sum(counted) == path.stat().st_size and min(counted) >= 0 and len([each for each in counted if each]) > 5


def test_a_file_that_is_left_in_its_middle_or_damaged_is_not_kept(tmp_path: Path, text: Path) -> None:
    store, damaged = Kept(tmp_path), tmp_path / "x.jsonl.gz"
    damaged.write_bytes((text / "b.jsonl.gz").read_bytes()[:-3000])
    with store.keeping():
        left = read(text / "b.jsonl.gz", store)
        next(left)
        left.close()  # type: ignore[attr-defined]
        list(documents(str(damaged), Reading(unpack=store.unpack, on_error="skip")))
        whole = list(read(text / "a.jsonl.gz", store))
    (name,) = json.loads((tmp_path / "unpacked.json").read_text())
    assert "a.jsonl.gz" in name
    assert list(read(text / "a.jsonl.gz", Kept(tmp_path))) == whole


KILLED = """
import os, signal, sys
from drumline.data import Corpus, Recipe, preparing
from drumline.encoding import journal, kept, parts
preparing.FAST_BYTES, kept.PIECE_BYTES, parts.SAMPLE_BYTES = 1, 2000, 20_000
source, out, moment, count = sys.argv[1:]
left = int(count)
places = {"write": (kept.Kept, "write"), "plan": (kept, "replace_text"), "part": (journal.Journal, "add_part")}
owner, name = places[moment]
call = getattr(owner, name)
def counted(*arguments, **more):
    global left
    left -= 1
    if left < 0: os.kill(os.getpid(), signal.SIGKILL)
    return call(*arguments, **more)
setattr(owner, name, counted)
preparing.prepare(Recipe(Corpus(source, valid_fraction=0.1), None, 400), out)
"""


@pytest.mark.parametrize(("moment", "count", "unpacks"), [("write", 2, 2), ("plan", 0, 2), ("part", 0, 0)])
def test_after_a_kill_what_was_kept_is_used_or_made_anew_and_nothing_stays(
    tmp_path: Path, text: Path, unpacked: list[str], moment: str, count: int, unpacks: int
) -> None:
    words = [sys.executable, "-c", KILLED, str(text), str(tmp_path / "out"), moment, str(count)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.glob("out.parts-*/unpacked.bin"))
    found = prepared(text, tmp_path / "out")
    assert len(unpacked) == unpacks
    expected = prepared(text, tmp_path / "other")
    assert all(found[name] == expected[name] for name in expected if name != "manifest.json")


def test_a_source_of_unknown_size_is_sampled_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text(
        "def texts():\n    while True:\n        yield 'the drum beats ' * 10\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sampling, "READ_BYTES", 50_000)
    corpus = Corpus("endless:texts", valid_fraction=0.5)
    text = Stretches(corpus, in_stretches(corpus, cut_bytes=None), cut_bytes=None, notes=tmp_path)
    sample, has_held_out = sampling.sampled(text, Meter("reading", lambda _: None), sample_bytes=20_000)
    assert has_held_out and 20_000 <= sum(map(len, sample)) < 20_200
