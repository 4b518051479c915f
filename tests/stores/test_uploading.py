"""Checkpoints in an object store: complete or not there, whatever is killed, slow or failing."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.object_store import ObjectStore
from helpers.ranks import TIMEOUT_S, run_ranks
from helpers.saved import save

pytest.importorskip("obstore", reason="needs obstore: pip install 'drumline[cloud]'")

from drumline.checkpoint.checkpoints import MANIFEST, open_checkpoint
from drumline.checkpoint.retention import Retention, reasons, step_of
from drumline.errors import CheckpointError, ConfigError
from drumline.files.run_folder import RunFolder
from drumline.stores.fetching import bring
from drumline.stores.of_run import RunStore
from drumline.stores.uploading import Uploader

URL = "s3://bucket/run"
Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.checkpoints.mkdir(parents=True)
    made.run_id()
    made.config.write_text("[run]\nseed = 1\n")
    return made


def uploader_of(
    folder: RunFolder, told: Told | None = None, retention: Retention | None = None, **settings: Any
) -> Uploader:
    def tell(message: str, event: dict[str, Any]) -> None:
        if told is not None:
            told.append((message, event))

    made = Uploader(RunStore(URL, patience_s=0.1), folder, retention=retention or Retention(), tell=tell, **settings)
    made.pauses_s = (0.02, 0.1)
    return made


def upload(folder: RunFolder, *steps: int, **settings: Any) -> Told:
    """Save and upload each of these steps in turn; gives what was told."""
    told: Told = []
    uploader = uploader_of(folder, told, **settings)
    for step in steps:
        save(folder, step) if not folder.checkpoint(step).exists() else None
        uploader.offer(step)
        assert uploader.wait(TIMEOUT_S)
    uploader.close()
    return told


def events(told: Told, kind: str) -> list[int]:
    return [event.get("step", 0) for _, event in told if event["event"] == kind]


def valid_there(where: Path) -> list[int]:
    """The complete checkpoints of the store, each fetched to an empty folder, where it is valid."""
    run = RunStore(URL)
    complete = run.complete()
    for step, files in complete.items():
        fresh = RunFolder(where / f"fresh-{step}")
        shutil.rmtree(fresh.path, ignore_errors=True)
        bring(run, fresh, step, files)
        assert open_checkpoint(fresh.checkpoint(step)).step == step
    return list(complete)


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sweep(root: Path) -> str:
    """Kill a process at each point of an upload; forks from a process that has no threads."""
    folder, points = RunFolder(root / "run"), root / "points"
    folder.checkpoints.mkdir(parents=True)
    folder.run_id()
    folder.config.write_text("[run]\nseed = 1\n")
    for step in range(1, 6):
        save(folder, step)

    def first() -> None:
        reached: list[str] = []
        upload(folder, 1, 2, 3, 4, 5, retention=Retention(last=2, best=False), reached=reached.append)
        points.write_text(json.dumps(list(dict.fromkeys(reached))))

    assert in_child(first) == 0
    names = json.loads(points.read_text())
    assert {"before the manifest", MANIFEST, "deleted", "tidied", "config.toml"} < set(names)
    step, steps = 5, root / "steps"
    for name in names:
        step += 1
        save(folder, step)
        folder.config.write_text(f"[run]\nseed = {step}\n")  # so that it is uploaded again

        def die(point: str, at: str = name) -> None:
            if point == at:
                os.kill(os.getpid(), signal.SIGKILL)

        kill = partial(upload, folder, step, retention=Retention(last=2, best=False), reached=die)
        assert in_child(kill) == -signal.SIGKILL, name
        assert in_child(lambda: steps.write_text(json.dumps(valid_there(root))) and None) == 0, name
        whole = json.loads(steps.read_text())
        assert len(whole) >= 2 and whole[-1] == (step if names.index(name) >= names.index(MANIFEST) else whole[-1])
        assert whole[-1] >= step - 1 - names.index(MANIFEST), name
    assert in_child(lambda: upload(folder, step + 1, retention=Retention(last=2, best=False)) and None) == 0
    assert not list(folder.checkpoints.glob(".upload-*"))
    return str(len(names))


def test_a_process_killed_anywhere_in_an_upload_leaves_whole_checkpoints_in_the_store(tmp_path: Path) -> None:
    with ObjectStore() as store:
        (outcome,) = run_ranks(sweep, [(tmp_path,)], environ=store.environ)
        assert outcome.code == 0 and int(outcome.value) >= 7, outcome.err
        steps = {name.split("/")[3] for name in store.objects if name.startswith("bucket/run/checkpoints/")}
        assert len(steps) == 2  # what was not complete is gone
        assert all(f"bucket/run/checkpoints/{step}/{MANIFEST}" in store.objects for step in steps)


def test_the_manifest_is_uploaded_last_and_deleted_first(store: ObjectStore, folder: RunFolder) -> None:
    order: list[str] = []

    def note(method: str, name: str, body: bytes) -> None:
        if method == "PUT" and "/checkpoints/" in name:
            order.append("+" + name.rpartition("/")[2])
        elif method == "POST" and b"<Delete" in body:
            order.append("-" + body.decode().partition("<Key>")[2].partition("</Key>")[0].rpartition("/")[2])

    store.fault = note
    upload(folder, 1, 2, retention=Retention(last=1, best=False))
    assert order[:4] == order[4:8] and order[3] == f"+{MANIFEST}" and len(set(order[:4])) == 4
    assert order[8] == f"-{MANIFEST}" and len(order) == 12


def test_a_slow_store_does_not_hold_up_training_and_gets_the_newest(
    store: ObjectStore, folder: RunFolder, tmp_path: Path
) -> None:
    may_go, asked = threading.Event(), threading.Event()

    def gate(method: str, name: str, body: bytes) -> None:
        if method == "PUT" and "step-00000001" in name:
            asked.set()
            assert may_go.wait(TIMEOUT_S)

    store.fault, told = gate, []
    uploader = uploader_of(folder, told)
    save(folder, 1)
    uploader.offer(1)
    assert asked.wait(TIMEOUT_S)
    for step in (2, 3, 4):  # each of these returns, though nothing can be uploaded
        save(folder, step)
        uploader.offer(step)
    assert uploader.uploaded_step is None and not told
    may_go.set()
    assert uploader.wait(TIMEOUT_S)
    assert events(told, "uploaded") == [1, 4] and events(told, "uploads skipped") == [4]
    (message,) = [message for message, event in told if event["event"] == "uploads skipped"]
    assert message.startswith("2 checkpoints could not be uploaded before newer ones were saved")
    assert valid_there(tmp_path) == [1, 4]


def test_a_checkpoint_that_is_deleted_locally_while_it_is_uploaded_is_whole_in_the_store(
    store: ObjectStore, folder: RunFolder, tmp_path: Path
) -> None:
    may_go, asked = threading.Event(), threading.Event()

    def gate(method: str, name: str, body: bytes) -> None:
        if method == "PUT" and "/checkpoints/" in name:
            asked.set()
            assert may_go.wait(TIMEOUT_S)

    store.fault = gate
    uploader = uploader_of(folder)
    save(folder, 1)
    uploader.offer(1)
    assert asked.wait(TIMEOUT_S)
    shutil.rmtree(folder.checkpoint(1))
    may_go.set()
    assert uploader.wait(TIMEOUT_S)
    assert valid_there(tmp_path) == [1] and not list(folder.checkpoints.iterdir())


def test_one_that_is_gone_before_its_turn_is_no_failure(store: ObjectStore, folder: RunFolder, tmp_path: Path) -> None:
    told: Told = []
    uploader = uploader_of(folder, told)
    uploader.offer(1)
    assert uploader.wait(TIMEOUT_S) and not told
    save(folder, 2)
    uploader.offer(2)
    assert uploader.wait(TIMEOUT_S) and valid_there(tmp_path) == [2]


def test_a_store_that_fails_is_told_once_and_gets_the_newest_when_it_is_back(
    store: ObjectStore, folder: RunFolder, tmp_path: Path
) -> None:
    tried = threading.Semaphore(0)

    def fail(method: str, name: str, body: bytes) -> int:
        tried.release()
        return 500

    store.fault, told = fail, []
    uploader = uploader_of(folder, told)
    save(folder, 1)
    uploader.offer(1)
    for _ in range(9):
        assert tried.acquire(timeout=TIMEOUT_S)
    save(folder, 2)
    uploader.offer(2)
    store.fault = lambda method, name, body: None
    assert uploader.wait(TIMEOUT_S)
    assert events(told, "upload failed") == [1] and events(told, "uploaded")[-1] == 2
    assert "it answered 500" in told[0][0] and "training continues" in told[0][0]
    assert told[-1][0] == f"step 2 is uploaded to {URL}, which works again" or events(told, "uploaded") == [1, 2]
    assert valid_there(tmp_path)[-1] == 2


def test_a_store_that_refuses_connections_gets_the_upload_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, folder: RunFolder, tmp_path: Path
) -> None:
    with ObjectStore() as before:
        for name, value in before.environ.items():
            monkeypatch.setenv(name, value)
    told: Told = []
    uploader = uploader_of(folder, told)
    save(folder, 1)
    uploader.offer(1)
    while not told:
        assert not uploader.wait(0.01)
    assert "connection refused" in told[0][0]
    with ObjectStore(before.port):
        assert uploader.wait(TIMEOUT_S)
        assert valid_there(tmp_path) == [1]


def test_the_end_of_a_run_gives_up_a_store_that_does_not_come_back_and_says_what_is_missing(
    store: ObjectStore, folder: RunFolder
) -> None:
    store.fault = lambda method, name, body: 503
    uploader, said = uploader_of(folder), list[str]()
    uploader.last_s = 0.0
    save(folder, 3)
    uploader.offer(3)
    with pytest.raises(
        CheckpointError, match=r"step 3 is not in s3://bucket/run: .*503.*\n.*run the same command again"
    ):
        uploader.finish(said.append)
    assert said == [f"waiting for the upload of step 3 to {URL}; press Ctrl-C to give it up"]
    uploader.close()


@pytest.mark.parametrize(
    "retention", [Retention(last=1, best=False), Retention(last=2, every=3), Retention(last=1, best=True)]
)
def test_the_store_keeps_what_the_disk_keeps(store: ObjectStore, folder: RunFolder, retention: Retention) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5, 6: 4.0}
    paths = [save(folder, step, valid_loss=loss) for step, loss in losses.items()]
    upload(folder, *losses, retention=retention)
    kept = reasons(paths, retention)
    assert list(RunStore(URL).checkpoints()) == [step_of(path) for path, why in kept.items() if why]


def test_a_step_that_was_computed_again_replaces_the_former_one(
    store: ObjectStore, folder: RunFolder, tmp_path: Path
) -> None:
    upload(folder, 1, 2)
    before = store.objects[f"bucket/run/checkpoints/step-00000002/{MANIFEST}"]
    shutil.rmtree(folder.checkpoint(2))
    save(folder, 2, valid_loss=1.0)
    told = upload(folder, 2)
    assert events(told, "uploaded") == [2] and valid_there(tmp_path) == [1, 2]
    assert store.objects[f"bucket/run/checkpoints/step-00000002/{MANIFEST}"] != before
    assert upload(folder, 2) == []  # what is there is not uploaded again


def test_a_run_that_goes_on_from_a_chosen_step_leaves_no_newer_ones_of_its_former_course(
    store: ObjectStore, folder: RunFolder
) -> None:
    upload(folder, 1, 2, 3, 4)
    upload(folder, 2, goes_back=True)
    assert list(RunStore(URL).checkpoints()) == [2]


def test_two_runs_do_not_share_a_place(store: ObjectStore, folder: RunFolder, tmp_path: Path) -> None:
    upload(folder, 1)
    other = RunFolder(tmp_path / "other")
    other.checkpoints.mkdir(parents=True)
    there = dict(store.objects)
    with pytest.raises(ConfigError, match="belongs to another run"):
        uploader_of(other).claim()
    told = upload(other, 7)
    assert [event["event"] for _, event in told] == ["uploads refused"] and store.objects == there


def test_the_process_that_began_last_uploads_and_the_one_before_stops(store: ObjectStore, folder: RunFolder) -> None:
    told: Told = []
    first = uploader_of(folder, told)
    for step in (1, 2):
        save(folder, step)
    first.claim()
    upload(folder, 1)
    first.offer(2)
    assert first.wait(TIMEOUT_S)
    assert list(RunStore(URL).checkpoints()) == [1]
    assert "is written by another process" in told[0][0] and len(told) == 1
