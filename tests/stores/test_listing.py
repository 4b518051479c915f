"""`drumline checkpoint list URL`: a run in a store is listed as a folder is, and what is wrong is said in two lines."""

import time
from pathlib import Path

import pytest
from helpers.object_store import SECRET, ObjectStore
from helpers.ranks import TIMEOUT_S
from helpers.saved import save

pytest.importorskip("obstore", reason="needs obstore: pip install 'drumline[cloud]'")

from drumline.checkpoint import list_checkpoints
from drumline.checkpoint.commands import Listed
from drumline.checkpoint.retention import Retention
from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder
from drumline.stores.keeping import stored_checkpoints
from drumline.stores.of_run import MANIFEST, RunStore
from drumline.stores.uploading import Uploader

URL = "s3://bucket/run"
OBJECTS = "bucket/run/checkpoints/step-{:08}/"


@pytest.fixture
def folder(tmp_path: Path, store: ObjectStore) -> RunFolder:
    """A run that keeps three and the best, with steps 2 to 5 on disk and in the store."""
    made = RunFolder(tmp_path / "run")
    made.checkpoints.mkdir(parents=True)
    made.run_id()
    made.config.write_text("[run]\nkeep_checkpoints = 3\n")
    uploader = Uploader(RunStore(URL), made, retention=Retention(last=3), tell=lambda message, event: None)
    for step, loss in enumerate([1.5, 2.25, 2.0, None], start=2):
        save(made, step, valid_loss=loss)
        uploader.offer(step)
        assert uploader.wait(TIMEOUT_S)
    uploader.close()
    return made


def facts(rows: list[Listed]) -> list[tuple[int, int, float | None, str]]:
    return [(row.step, row.bytes, row.valid_loss, row.kept) for row in rows]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert run_command(["checkpoint", *words]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("  fix: ")
    assert SECRET not in "".join(lines)
    return lines


def test_a_run_in_a_store_is_listed_as_its_folder_is(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    rows = stored_checkpoints(URL)
    assert facts(rows) == facts(list_checkpoints(folder.path))
    assert [row.kept for row in rows] == ["best", "last 3", "last 3", "newest"]
    assert all(abs(row.saved - time.time()) < 10 * 365 * 86400 for row in rows)
    assert run_command(["checkpoint", "list", URL + "/"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "saved", "size", "valid", "kept", "because"] and len(lines) == 5
    assert "1.5000" in lines[1] and lines[1].rstrip().endswith("best") and lines[4].rstrip().endswith("newest")
    for url in (f"{URL}/step-3", f"{URL}/checkpoints/step-00000003"):
        assert [row.step for row in stored_checkpoints(url)] == [3]


def test_what_is_not_complete_or_damaged_is_listed_as_not_used(folder: RunFolder, store: ObjectStore) -> None:
    del store.objects[OBJECTS.format(3) + MANIFEST]
    RunStore(URL).set_aside(4)
    kept = [row.kept for row in stored_checkpoints(URL)]
    assert kept == ["last 3, best", "not used: not complete", "not used: damaged", "newest"]


def test_a_run_that_has_uploaded_nothing_or_not_this_step_says_so(
    folder: RunFolder, store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no complete checkpoint of step 9 (steps there: 2, 3, 4, 5)" in said(capsys, "list", f"{URL}/step-9")[0]
    for name in [name for name in store.objects if "/checkpoints/" in name]:
        del store.objects[name]
    assert f"{URL} has no complete checkpoint" in said(capsys, "list", URL)[0]


@pytest.mark.parametrize(
    ("url", "problem", "fix"),
    [
        ("s3://bucket/other", "s3://bucket/other is not a run: nothing of one is there", "check bucket and folder"),
        ("s3://nowhere/run", "s3://nowhere/run does not exist (no such bucket)", "check the URL"),
        ("s3:///run", "s3:///run has no bucket", "write it as s3://BUCKET/FOLDER"),
        ("ftp://bucket/run", "is not the URL of a store: ftp:// is not known", "use one of s3://"),
        ("https://example.org/run", "is no place that a run uploads checkpoints to", "s3://BUCKET/RUN"),
        (f"s3://me:{SECRET}@bucket/run", "s3://bucket/run was given with a user", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_wrong_url_is_answered_in_two_lines(
    store: ObjectStore, capsys: pytest.CaptureFixture[str], url: str, problem: str, fix: str
) -> None:
    lines = said(capsys, "list", url)
    assert problem in lines[0] and fix in lines[1]


def test_without_credentials_or_with_wrong_ones_the_variables_are_named(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODY")
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = said(capsys, "list", URL)
    assert f"{URL}/checkpoints may not be listed: it answered 403" in lines[0] and "AWS_ACCESS_KEY_ID" in lines[1]


def test_a_store_that_is_gone_is_named_after_the_time_it_is_given(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRUMLINE_STORE_PATIENCE_S", "0.2")
    store.close()
    lines = said(capsys, "list", URL)
    assert "connection refused" in lines[0] and "AWS_ENDPOINT_URL" in lines[1]


@pytest.mark.parametrize("command", ["verify", "export", "prune"])
def test_what_works_on_folders_alone_says_so(capsys: pytest.CaptureFixture[str], command: str) -> None:
    lines = said(capsys, command, URL)
    assert f"{URL} is in a store, where checkpoints are only listed" in lines[0] and "--run_dir FOLDER" in lines[1]
