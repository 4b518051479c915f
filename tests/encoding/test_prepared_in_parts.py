"""Much text is prepared in parts: by several processes, and not again what a killed one has encoded."""

import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.app import run_command
from drumline.data import Corpus, Progress, Recipe, Tokenizer, TokenWriter, cutting, preparing, sources
from drumline.encoding import journal, parts, stretches
from drumline.encoding.fast import FastTokenizer
from drumline.errors import DataError

SMALL = {"FAST_BYTES": 1, "BATCH_BYTES": 3000, "REPORT_BYTES": 1000}
SIZES = [(preparing, SMALL), (parts, {"PART_BYTES": 9000}), (stretches, {"STRETCH_BYTES": 20_000})]
SIZES += [(sources, {"PART_BYTES": 2000}), (cutting, {"PART_BYTES": 2000})]
TEXT = "The drummer's beat {0}, é 太鼓 🥁, {0} times <|endoftext|>.\n"
TOKENIZER = Tokenizer.train([TEXT.format(number) for number in range(200)], vocab_size=500)


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, sizes in SIZES:
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


def write(path: Path, *, rows: int = 150, start: int = 0) -> None:
    path.parent.mkdir(exist_ok=True)
    texts = [TEXT.format(start + number) * (1 + number % 40) for number in range(rows)]
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")


def one_file(folder: Path) -> str:
    write(folder / "x.jsonl")
    return str(folder / "x.jsonl")


def compressed(folder: Path) -> str:
    write(folder / "plain" / "x.jsonl")
    (folder / "x.jsonl.xz").write_bytes(lzma.compress((folder / "plain" / "x.jsonl").read_bytes()))
    return str(folder / "x.jsonl.xz")


def one_text(folder: Path) -> str:
    """A single document, whose end is held out."""
    (folder / "x.txt").write_text("".join(map(TEXT.format, range(3000))), encoding="utf-8")
    return str(folder / "x.txt")


def many_files(folder: Path) -> str:
    """Small and large ones, of lines and plain, one of them empty, with a validation split of its own."""
    for number in range(12):
        write(folder / "many" / f"{number:02}.jsonl", rows=9 + 10 * number, start=1000 * number)
        (folder / "many" / f"{number:02}.md").write_text(TEXT.format(number) * number * 40 + "x", encoding="utf-8")
    write(folder / "many" / "valid.jsonl", rows=60)
    return str(folder / "many")


SOURCES = [one_file, compressed, one_text, many_files]


def recipe(source: str, **how: Any) -> Recipe:
    return Recipe(Corpus(source, valid_fraction=0.1), **({"tokenizer": TOKENIZER} | how))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def at_once(source: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the simple way gives, without parts."""
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "FAST_BYTES", 1 << 40)
        preparing.prepare(recipe(source), out)
    return contents(out)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "parts" in path.name or "partial" in path.name]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("workers", [1, 3])
def test_text_in_parts_has_the_bytes_of_text_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str], workers: int
) -> None:
    source = make(tmp_path)
    reports: list[Progress] = []
    made = preparing.prepare(recipe(source), tmp_path / "out", progress=reports.append, workers=workers)
    assert contents(tmp_path / "out") == at_once(source, tmp_path / "once", monkeypatch)
    assert leftovers(tmp_path) == [] and not made.reused and made.before_bytes == 0
    assert "slowly" not in made.skipped.note and "died" not in made.skipped.note
    encoding = [each for each in reports if each.stage == "encoding"]
    assert max(each.bytes_done for each in encoding) == encoding[-1].bytes_total


def test_a_file_of_lines_is_shared_in_ranges_that_name_the_lines_of_the_whole(tmp_path: Path) -> None:
    source = one_file(tmp_path)
    lines = Path(source).read_bytes().splitlines(keepends=True)
    lines[100] = b"{not json\n"
    Path(source).write_bytes(b"\n" * 3 + b"".join(lines))
    made = preparing.prepare(
        Recipe(Corpus(source, on_error="skip", valid_fraction=0.1), TOKENIZER), tmp_path / "out", workers=2
    )
    assert made.skipped.count == 1 and "x.jsonl:104 is not valid JSON" in made.skipped.first[0]
    with pytest.raises(DataError, match=r"x\.jsonl:104 is not valid JSON"):
        preparing.prepare(recipe(source), tmp_path / "other", workers=2)


KILLED = """
import os, signal, sys
from pathlib import Path
from drumline.data import Corpus, Recipe, Tokenizer, TokenWriter, preparing, tokens
from drumline.encoding import ahead, joining, journal, parts, stretches
import drumline.data.cutting
sizes, source, out, tokenizer, moment, count = sys.argv[1:]
for module, name, size in eval(sizes): setattr(sys.modules[module], name, size)
left = int(count)
def dying(owner, name):
    call = getattr(owner, name)
    def counted(*arguments, **more):
        global left
        left -= 1
        if left < 0: os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **more)
    setattr(owner, name, counted)
owners = dict.fromkeys(("add_part", "finish", "remove"), journal.Journal)
owners |= dict.fromkeys(("replace_text", "flush"), journal)
owners |= {"add": TokenWriter, "joined": parts, "write": tokens.Manifest, "rename": Path}
if moment: dying(owners[moment], moment)
known = Tokenizer.load(tokenizer) if tokenizer else None
if __name__ == "__main__":
    preparing.prepare(Recipe(Corpus(source, valid_fraction=0.1), known, 400), out)
"""
MODULE_SIZES = repr([(module.__name__, name, size) for module, sizes in SIZES for name, size in sizes.items()])


def start(source: str, out: Path, *, tokenizer: Path | str = "", moment: str = "", count: int = 0) -> Any:
    words = [sys.executable, "-c", KILLED, MODULE_SIZES, source, str(out), str(tokenizer), moment, str(count)]
    return subprocess.Popen(words)


MOMENTS = [("add", 3), ("add", 90), ("add", 140), ("add_part", 2), ("add_part", 5), ("finish", 0), ("finish", 1)]
MOMENTS += [("joined", 0), ("write", 0), ("remove", 0), ("replace_text", 0), ("replace_text", 2), ("rename", 3)]
MOMENTS += [("rename", 9), ("flush", 7)]


@pytest.mark.parametrize("make", [one_file, compressed, one_text])
def test_killed_anywhere_it_goes_on_where_it_was_and_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str]
) -> None:
    source = make(tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    expected = at_once(source, tmp_path / "once", monkeypatch)
    encoded: list[int] = []
    for number, (moment, count) in enumerate(MOMENTS):
        out = tmp_path / f"out-{number}"
        killed = start(source, out, tokenizer=tmp_path / "tokenizer.json", moment=moment, count=count)
        code = killed.wait(timeout=60)
        assert code in (-signal.SIGKILL, 0)
        made = preparing.prepare(recipe(source), out)
        assert contents(out) == expected, (moment, count)
        encoded.append(made.before_bytes if code else -1)
        for path in tmp_path.glob(f"*{out.name}.parts*"):  # killed when all was done but this
            assert moment == "remove", path
            shutil.rmtree(path)
    assert encoded.count(-1) < 5 and any(each > 20_000 for each in encoded)
    assert leftovers(tmp_path) == []


def test_the_tokenizer_of_a_killed_process_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = one_file(tmp_path)
    preparing.prepare(Recipe(Corpus(source, valid_fraction=0.1), None, 400), tmp_path / "whole")
    killed = start(source, tmp_path / "out", moment="add_part", count=2)
    assert killed.wait(timeout=60) == -signal.SIGKILL
    monkeypatch.setattr(parts, "train", None)
    made = preparing.prepare(Recipe(Corpus(source, valid_fraction=0.1), None, 400), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert made.before_bytes > 0


def waiting(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_that_share_a_folder_share_the_work_and_outlive_one_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = many_files(tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    expected = at_once(source, tmp_path / "once", monkeypatch)
    how = {"tokenizer": tmp_path / "tokenizer.json"}
    dies = start(source, tmp_path / "out", moment="add", count=30, **how)
    others = [start(source, tmp_path / "out", **how) for _ in range(2)]
    assert [each.wait(timeout=120) for each in (dies, *others)] in ([-signal.SIGKILL, 0, 0], [0, 0, 0])
    assert contents(tmp_path / "out") == expected
    assert leftovers(tmp_path) == []


def test_what_a_stopped_process_holds_is_taken_once_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = one_file(tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    expected = at_once(source, tmp_path / "once", monkeypatch)
    how = {"tokenizer": tmp_path / "tokenizer.json"}
    first = start(source, tmp_path / "out", **how)
    waiting(lambda: any(tmp_path.glob("out.parts-*/fast/.0*/train.bin")) or first.poll() is not None)
    first.send_signal(signal.SIGSTOP)
    second = start(source, tmp_path / "out", **how)
    waiting(lambda: any(tmp_path.glob("out.parts-*/fast/00005.json")) or second.poll() is not None)
    first.kill()
    assert second.wait(timeout=60) == 0
    first.wait()
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("variables", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
def test_ranks_of_torchrun_and_srun_share_the_work_and_the_first_one_speaks(
    tmp_path: Path, variables: tuple[str, str]
) -> None:
    folder = tmp_path / "text"
    for number in range(4):
        write(folder / f"{number}.jsonl", rows=1000, start=1000 * number)  # more than FAST_BYTES
    TOKENIZER.save(tmp_path / "tokenizer.json")
    words = [sys.executable, "-m", "drumline", "prepare", str(folder), "--tokenizer", str(tmp_path / "tokenizer.json")]
    rest = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    ranks = [
        subprocess.Popen(
            [*words, "--out", str(tmp_path / "out")],
            env=rest | dict(zip(variables, (str(rank), "3"), strict=True)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert "next:" in said[0] and said[1:] == ["", ""]
    assert run_command([*words[3:], "--out", str(tmp_path / "alone")]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert leftovers(tmp_path) == []


def test_a_worker_that_dies_is_told_and_its_part_is_done_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = many_files(tmp_path)
    expected = at_once(source, tmp_path / "once", monkeypatch)
    monkeypatch.setattr("drumline.encoding.workers._work", _die)
    made = preparing.prepare(recipe(source), tmp_path / "out", workers=2)
    assert contents(tmp_path / "out") == expected
    assert "1 of the workers died (signal 9), others did their part" in made.skipped.note


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("change", ["text", "settings"])
def test_parts_of_other_text_or_settings_are_not_used_which_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = one_file(tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    killed = start(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", moment="add_part", count=3)
    assert killed.wait(timeout=60) == -signal.SIGKILL
    now = recipe(source)
    if change == "text":
        write(Path(source), start=7)
        expected = at_once(source, tmp_path / "once", monkeypatch)
    else:
        now = Recipe(Corpus(source, valid_fraction=0.2), TOKENIZER)
        preparing.prepare(now, tmp_path / "once")
        expected = contents(tmp_path / "once")
    made = preparing.prepare(now, tmp_path / "out")
    assert made.before_bytes == 0 and "; started over, because the text or the settings" in made.skipped.note
    assert contents(tmp_path / "out") == expected
    assert leftovers(tmp_path) == []


def test_parts_that_a_living_process_makes_by_other_settings_are_left_alone(tmp_path: Path) -> None:
    source = one_file(tmp_path)
    other = journal.Journal(tmp_path / "out", "0" * 64)
    with other.open():
        made = preparing.prepare(recipe(source), tmp_path / "out")
        assert other.folder.exists() and made.skipped.note == ""


def test_a_text_that_changes_while_it_is_prepared_is_refused(tmp_path: Path) -> None:
    source = many_files(tmp_path)

    def change(progress: Progress) -> None:
        if progress.stage == "joining":
            with (Path(source) / "05.md").open("a") as file:
                file.write("more")

    with pytest.raises(DataError, match="many changed while it was prepared"):
        preparing.prepare(recipe(source), tmp_path / "out", progress=change)
    assert not (tmp_path / "out").exists()
    assert preparing.prepare(recipe(source), tmp_path / "out").before_bytes == 0


@pytest.mark.parametrize("name", ["add", "close"])
def test_a_full_disk_is_named_and_what_is_encoded_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, calls = one_file(tmp_path), 0
    expected = at_once(source, tmp_path / "once", monkeypatch)
    plain = getattr(TokenWriter, name)

    def full(self: TokenWriter, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > (100 if name == "add" else 7):
            raise OSError(28, "No space left on device")
        return plain(self, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, name, full)
        with pytest.raises(DataError, match="out is not writable: No space left on device") as refused:
            preparing.prepare(recipe(source), tmp_path / "out")
    assert "free up space and run the same command again" in refused.value.fix
    assert preparing.prepare(recipe(source), tmp_path / "out").before_bytes > 0
    assert contents(tmp_path / "out") == expected


def test_a_damaged_part_is_refused_with_what_to_remove(tmp_path: Path) -> None:
    source = one_file(tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    killed = start(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", moment="add_part", count=3)
    assert killed.wait(timeout=60) == -signal.SIGKILL
    (folder,) = tmp_path.glob("out.parts-*")
    with (folder / "fast" / "00000-000" / "train.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="00000-000 is damaged") as refused:
        preparing.prepare(recipe(source), tmp_path / "out")
    assert str(folder) in refused.value.fix
    shutil.rmtree(folder)
    preparing.prepare(recipe(source), tmp_path / "out")


def test_one_process_that_finds_other_ids_makes_all_encode_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, calls = one_file(tmp_path), 0
    expected = at_once(source, tmp_path / "once", monkeypatch)
    encode = FastTokenizer._encode

    def wrong(self: FastTokenizer, texts: list[str]) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        ids: Any = encode(self, texts)
        return ids if calls < 40 else [each[::-1] for each in ids]

    monkeypatch.setattr(FastTokenizer, "_encode", wrong)
    made = preparing.prepare(recipe(source), tmp_path / "out", workers=2)
    assert contents(tmp_path / "out") == expected
    assert "; encoded slowly, by tokenizers: gigatoken gives other ids" in made.skipped.note


def test_the_command_says_what_was_encoded_before_and_refuses_no_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = one_file(tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    killed = start(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", moment="add_part", count=3)
    assert killed.wait(timeout=60) == -signal.SIGKILL
    words = ["prepare", source, "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert run_command([*words, "--valid_fraction", "0.1", "--workers", "0"]) == 1
    assert "workers is 0" in capsys.readouterr().err
    assert run_command([*words, "--valid_fraction", "0.1", "--workers", "2"]) == 0
    assert "went on where it was: 0." in capsys.readouterr().out
