"""A run goes on from an object store: on a new machine, with the same bits, and trusts it no more than a folder."""

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.hub import TOKEN, Hub
from helpers.object_store import KEY, SECRET, ObjectStore
from helpers.ranks import TIMEOUT_S
from helpers.small import small
from helpers.warm import Warm, piped, run_warm

pytest.importorskip("obstore", reason="needs obstore: pip install 'drumline[cloud]'")

from drumline.errors import CheckpointError, ConfigError
from drumline.files.run_folder import RunFolder
from drumline.stores.fetching import _fetch_checkpoint, bring
from drumline.stores.of_run import MANIFEST, RunStore, split_url

URL = "s3://bucket/runs/big"
STORE = ("--checkpoint_store", URL)


def words(*flags: str, resumes: bool = False) -> list[str]:
    own = small("--train_data_path", "text", "--bitwise", "--save_every", "2", "--global_batch_size", "8")
    return [sys.executable, "-m", "drumline", "train", *([] if resumes else own), *flags]


def run(*flags: str, resumes: bool = False, code: int = 0) -> str:
    """What `drumline train` prints, on both streams."""
    done = run_warm(words(*flags, resumes=resumes), timeout=TIMEOUT_S)
    assert done.returncode == code, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def sha256(folder: str) -> str:
    return str(json.loads(Path(folder, "status.json").read_text())["weights_sha256"])


def events(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]


def run_until_second_upload(store: ObjectStore, folder: str) -> None:
    """A run that is killed with its machine while the manifest of a checkpoint after step 2 is uploaded: that of step
    4, or of step 6 if that was saved before the first upload ended."""
    asked, may_go = threading.Event(), threading.Event()

    def gate(method: str, name: str, body: bytes) -> int | None:
        if method == "PUT" and f"/{MANIFEST}" in name and "step-00000002" not in name:
            asked.set()
            may_go.wait(TIMEOUT_S)
            return 500
        return None

    store.fault = gate
    with Warm(words(*STORE, "--run_dir", folder), stdout=-3, stderr=-3) as process:
        assert asked.wait(TIMEOUT_S)
        process.send_signal(signal.SIGKILL)
    may_go.set()
    store.fault = lambda method, name, body: None
    shutil.rmtree(folder)
    shutil.rmtree("data")


@pytest.mark.parametrize("ranks", [["--nproc", "2"], []], ids=["two-ranks", "one-process"])
def test_a_run_whose_machine_is_gone_resumes_elsewhere_and_ends_with_the_same_bits(
    here: Path, store: ObjectStore, ranks: list[str]
) -> None:
    run("--run_dir", "reference")
    run_until_second_upload(store, "lost")
    printed = run(*STORE, "--run_dir", "new", *ranks, resumes=True)
    assert f"fetching {URL}/checkpoints/step-00000002" in printed
    assert sha256("new") == sha256("reference")
    assert [each["step"] for each in events("new") if each["event"] == "uploaded"][-1] == 6
    assert {2, 6} <= {*RunStore(URL).checkpoints()} <= {2, 4, 6}
    steps = [json.loads(line)["step"] for line in Path("new/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and set(steps) == {1, 2, 3, 4, 5, 6}
    uploaded = store.objects["bucket/runs/big/metrics.jsonl"].decode().splitlines()
    assert [json.loads(line)["step"] for line in uploaded] == steps


_ACCOUNT = {"gcs_base_url": "HOST", "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
GOOGLE = {"STORAGE_EMULATOR_HOST": "HOST", "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(_ACCOUNT)}
AZURE = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": "HOST", "AZURE_ENDPOINT": "HOST"}


@pytest.mark.parametrize(("scheme", "opens", "environ"), [("gs", "", GOOGLE), ("az", "devstoreaccount1:", AZURE)])
def test_checkpoints_in_other_clouds_are_kept_found_and_resumed_from(
    here: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, scheme: str, opens: str, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value.replace("HOST", f"http://127.0.0.1:{store.port}"))
    store.opens, there = opens, ("--checkpoint_store", f"{scheme}://bucket/runs/big")
    run("--run_dir", "reference")
    run(*there, "--run_dir", "lost")
    last = [name for name in store.objects if "step-00000006/" in name]
    assert last
    for name in last:  # the machine went before its end
        del store.objects[name]
    shutil.rmtree("lost")
    printed = run(*there, "--run_dir", "new", resumes=True)
    assert f"fetching {scheme}://bucket/runs/big/checkpoints/step-0000000" in printed
    assert sha256("new") == sha256("reference")
    assert 6 in RunStore(there[1]).checkpoints()


def test_checkpoints_in_a_repository_of_the_hub_are_kept_found_and_resumed_from(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    there = ("--checkpoint_store", "hf://some/one/runs/big")
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        run("--run_dir", "reference")
        run(*there, "--run_dir", "lost")
        hub.files = {name: content for name, content in hub.files.items() if "step-00000006/" not in name}
        assert any("step-0000000" in name for name in hub.files)  # the machine went before its end
        shutil.rmtree("lost")
        printed = run(*there, "--run_dir", "new", resumes=True)
        assert "fetching hf://some/one/runs/big/checkpoints/step-0000000" in printed
        assert any("step-00000006/" in name for name in hub.files)
    assert sha256("new") == sha256("reference")


def test_an_event_tells_the_seconds_and_bytes_of_each_upload(here: Path, store: ObjectStore) -> None:
    run(*STORE, "--run_dir", "run")
    uploads = [each for each in events("run") if each["event"] == "uploaded"]
    assert uploads and all(each["seconds"] > 0 and each["bytes"] > 1000 for each in uploads)
    assert uploads[-1]["step"] == 6


def test_a_damaged_checkpoint_in_the_store_is_named_and_the_one_before_is_used(here: Path, store: ObjectStore) -> None:
    run(*STORE, "--run_dir", "run")
    expected = sha256("run")
    shutil.rmtree("run")
    (file,) = (name for name in store.objects if "step-00000006/model" in name)
    content = bytearray(store.objects[file])
    content[-5] ^= 1
    store.objects[file] = bytes(content)
    # The upload of the one between did not end, or did not begin because a newer one was there.
    store.objects.pop(f"bucket/runs/big/checkpoints/step-00000004/{MANIFEST}", None)
    printed = run(*STORE, "--run_dir", "run", resumes=True)
    assert (
        f"{URL}/checkpoints/step-00000006 is damaged: model" in printed
        and "resuming from run/checkpoints/step-00000002" in printed
    )
    assert sha256("run") == expected
    names = RunStore(URL).complete()
    assert {2, 6} <= {*names} <= {2, 4, 6}
    assert store.objects[file] != bytes(content)  # the run has come there again


def test_what_the_disk_has_not_is_fetched_and_what_it_has_is_not(here: Path, store: ObjectStore) -> None:
    run(*STORE, "--run_dir", "run")
    assert "fetching" not in run("--run_dir", "run", resumes=True)
    damaged = next(Path("run/checkpoints/step-00000006").glob("model*"))
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    printed = run("--run_dir", "run", resumes=True)
    assert f"fetching {URL}/checkpoints/step-00000006" in printed and "had finished already" in printed


def test_a_new_run_begins_from_a_checkpoint_in_a_store_as_from_one_on_disk(here: Path, store: ObjectStore) -> None:
    run(*STORE, "--run_dir", "run")
    there = dict(store.objects)
    run("--run_dir", "from-disk", "--resume_from", "run/checkpoints/step-00000002", resumes=True)
    shutil.rmtree("run")
    printed = run("--run_dir", "from-store", "--resume_from", f"{URL}/step-2", resumes=True)
    assert "resuming from from-store/checkpoints/step-00000002" in printed
    assert sha256("from-store") == sha256("from-disk")
    run("--run_dir", "newest", "--resume_from", URL, resumes=True)
    assert "step-00000006" in str(list(Path("newest/checkpoints").iterdir()))
    assert store.objects == there  # it is the other run's
    printed = run("--run_dir", "none", "--resume_from", f"{URL}/step-00000005", resumes=True, code=1)
    there_now = ", ".join(map(str, RunStore(URL).complete()))  # step 4 may have been skipped for step 6
    assert f"{URL} has no complete checkpoint of step 5 (steps there: {there_now})" in printed
    assert not Path("none").exists()


def test_two_runs_do_not_write_to_one_place(here: Path, store: ObjectStore) -> None:
    run(*STORE, "--run_dir", "run")
    there = dict(store.objects)
    run("--run_dir", "other")
    assert f"{URL} belongs to another run" in run(*STORE, "--run_dir", "other", code=1)
    printed = run(*STORE, "--run_dir", "third", "--lr", "0.5", code=1)
    assert "different settings: lr" in printed and "--checkpoint_store" in printed and not Path("third").exists()
    assert store.objects == there


def test_no_credential_is_in_any_file_line_or_object(here: Path, store: ObjectStore) -> None:
    printed = [run(*STORE, "--run_dir", "run")]
    shutil.rmtree("run")
    printed.append(run(*STORE, "--run_dir", "run", resumes=True))
    store.fault = lambda method, name, body: 403
    printed.append(run(*STORE, "--run_dir", "new", code=1))
    assert "may not be" in printed[-1] and "AWS_ACCESS_KEY_ID" in printed[-1]
    printed.append(run("--checkpoint_store", f"s3://{KEY}:{SECRET}@bucket/run", "--run_dir", "url", code=1))
    files = [path.read_bytes() for path in here.rglob("*") if path.is_file()]
    assert len(files) > 10 and not Path("url").exists()
    for content in (*files, *store.objects.values(), *(text.encode() for text in printed)):
        assert SECRET.encode() not in content and KEY.encode() not in content


def test_code_that_a_run_in_a_store_names_is_not_run(here: Path, store: ObjectStore) -> None:
    run(*STORE, "--run_dir", "run")
    shutil.rmtree("run")
    config = store.objects["bucket/runs/big/config.toml"].decode()
    store.objects["bucket/runs/big/config.toml"] = config.replace("[records]", '[records]\nsink = "evil:run"').encode()
    Path("evil.py").write_text("open('ran', 'w')\n")
    for flags in ((*STORE, "--run_dir", "run"), ("--resume_from", URL, "--run_dir", "run")):
        printed = run(*flags, resumes=True, code=1)
        assert f"{URL} names code that you have not used here before: sink evil:run" in printed
    assert not Path("ran").exists() and not Path("run").exists()


def test_names_in_a_store_stay_in_the_run_folder(here: Path, store: ObjectStore) -> None:
    run(*STORE, "--run_dir", "run")
    shutil.rmtree("run")
    base = "bucket/runs/big"
    for name in (
        "evil.py",
        "pretrained/a/evil.json",
        "checkpoints/step-00000006/evil.bin",
        "a/evil.json",
        ".evil.json",
    ):
        store.objects[f"{base}/{name}"] = b"{}"
    before = {path for path in here.rglob("*") if path.is_file()}
    run(*STORE, "--run_dir", "run", resumes=True)
    new = {path for path in here.rglob("*") if path.is_file()} - before
    assert not [path for path in new if "evil" in path.name] and not any("evil" in path.name for path in before)
    assert all(path.is_relative_to(here / "run") for path in new if "data" not in path.parts)
    store.objects[f"{base}/checkpoints/step-00000006/../../../../evil"] = b"{}"
    assert "illegal character" in run(*STORE, "--run_dir", "another", resumes=True, code=1)


def test_ctrl_c_gives_up_waiting_for_the_last_upload_and_says_what_is_missing(here: Path, store: ObjectStore) -> None:
    may_go = threading.Event()
    store.fault = lambda method, name, body: (may_go.wait(TIMEOUT_S), None)[1] if "step-00000006/" in name else None
    process = piped([*words(*STORE, "--run_dir", "run")[1:]])
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if "waiting for the upload of step 6" in line:
            os.kill(process.pid, signal.SIGINT)
    may_go.set()
    assert process.wait(TIMEOUT_S) == 1, lines
    assert f"the checkpoint of step 6 is not in {URL}" in lines[-2] and "run the same command again" in lines[-1]
    store.fault = lambda method, name, body: None
    run("--run_dir", "run", resumes=True)
    assert list(RunStore(URL).complete())[-1] == 6


def test_a_run_that_knows_its_store_goes_on_while_it_is_gone_and_a_new_one_is_refused(here: Path) -> None:
    with ObjectStore() as store:
        environ = {**os.environ, **store.environ, "DRUMLINE_STORE_PATIENCE_S": "0.2"}
        first = run_warm(words(*STORE, "--run_dir", "run", "--total_steps", "4"), timeout=TIMEOUT_S, env=environ)
        assert first.returncode == 0
    refused = run_warm(words(*STORE, "--run_dir", "new"), timeout=TIMEOUT_S, env=environ)
    assert refused.returncode == 1 and "connection refused" in refused.stderr and not Path("new").exists()
    longer = ["--total_steps", "6", "--allow_change", "total_steps"]
    with Warm(
        words("--run_dir", "run", *longer, resumes=True), stdout=-1, stderr=-2, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "waiting for the upload of step 6" in line:
                break
        with ObjectStore(store.port) as back:
            back.objects.update(store.objects)
            assert process.wait(TIMEOUT_S) == 0
            assert f"bucket/runs/big/checkpoints/step-00000006/{MANIFEST}" in back.objects
    assert any("the run goes on with what is in run" in line for line in lines)


@pytest.mark.needs("disks")
def test_a_disk_that_fills_while_a_checkpoint_is_fetched_is_named_and_nothing_of_it_stays(
    here: Path, store: ObjectStore, small_disk: Path
) -> None:
    run(*STORE, "--run_dir", "run")
    (small_disk / "full").write_bytes(bytes(100 << 10))
    printed = run(*STORE, "--run_dir", str(small_disk / "run"), resumes=True, code=1)
    assert "No space left on device" in printed and "choose another --run_dir" in printed
    assert [path.name for path in small_disk.iterdir()] == ["full"]


def test_a_disk_that_fails_in_the_middle_of_a_checkpoint_leaves_nothing(
    here: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*STORE, "--run_dir", "run")
    stored, new = RunStore(URL), RunFolder(Path("new"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match="No space left"):
        bring(stored, new, 6, stored.complete()[6])
    assert list(new.checkpoints.iterdir()) == []


def test_a_store_without_a_valid_checkpoint_is_an_error(here: Path, store: ObjectStore) -> None:
    run(*STORE, "--run_dir", "run")
    for name in [name for name in store.objects if name.endswith(MANIFEST)]:
        store.objects[name] = b"{}"
    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged: its manifest\.json cannot be read"):
        _fetch_checkpoint(RunStore(URL), RunFolder(Path("new")), step=None)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://nowhere/run", "no such bucket"),
        ("runs/x", "is not a place that checkpoints can be uploaded to"),
        ("https://example.org/run", "is not a place that checkpoints can be uploaded to"),
        ("s3://", "has no bucket"),
        ("ftp://bucket/run", "is not a place that checkpoints can be uploaded to"),
        ("s3://bucket/run/step-20", "is a checkpoint, not a run"),
        ("s3://bucket/../run", "has . or .. in it"),
    ],
)
def test_a_wrong_url_is_refused_before_anything_is_written(
    here: Path, store: ObjectStore, url: str, problem: str
) -> None:
    printed = run("--checkpoint_store", url, "--run_dir", "run", code=1)
    assert problem in printed and printed.count("fix: ") == 1 and "Traceback" not in printed
    assert not Path("run").exists() and not store.objects


def test_a_url_names_a_run_or_one_of_its_checkpoints() -> None:
    assert split_url("s3://bucket/run/") == ("s3://bucket/run", None)
    assert split_url("s3://bucket/run/step-20") == ("s3://bucket/run", 20)
    assert split_url("s3://bucket/run/checkpoints/step-00000020/") == ("s3://bucket/run", 20)
