"""Tokens and checkpoints in an S3 server that others have written: moto's, looked at by Amazon's own client."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.large_tokens import large_folder
from helpers.moto_server import SECRET, MotoServer
from helpers.small import small

from drumline.checkpoint.checkpoints import MANIFEST
from drumline.cli.app import run_command
from drumline.errors import DataError
from drumline.stores.client import PART_BYTES, MissingObjectError, open_store

BUCKET = "bucket"


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    with MotoServer() as made:
        yield made


@pytest.fixture
def client(server: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of an empty bucket."""
    monkeypatch.chdir(tmp_path)
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    made = server.client()
    made.create_bucket(Bucket=BUCKET)
    yield made
    for name in names(made):
        made.delete_object(Bucket=BUCKET, Key=name)
    made.delete_bucket(Bucket=BUCKET)


def names(client: Any, prefix: str = "") -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return [each["Key"] for page in pages for each in page.get("Contents", [])]


def train(run: str, *flags: str) -> str:
    """The hash of the weights at the end of a run."""
    assert run_command(["train", *small("--bitwise", "--global_batch_size", "8", *flags), "--run_dir", run]) == 0
    return str(json.loads(Path(run, "status.json").read_text())["weights_sha256"])


def test_tokens_read_by_range_give_the_bits_of_a_run_from_a_disk_and_then_come_from_the_cache(
    client: Any, tmp_path: Path
) -> None:
    local = large_folder(tmp_path / "tokens")
    for path in local.iterdir():
        client.upload_file(str(path), BUCKET, f"sets/tokens/{path.name}")
    wanted = train("local", "--train_data_path", str(local))
    assert train("stored", "--train_data_path", "s3://bucket/sets/tokens") == wanted
    client.delete_object(Bucket=BUCKET, Key="sets/tokens/train.documents.bin")  # not needed to train
    assert train("cached", "--train_data_path", "s3://bucket/sets/tokens") == wanted


def test_damaged_tokens_in_the_store_end_a_run_with_their_place(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = large_folder(tmp_path / "tokens")
    content = bytearray((local / "train.bin").read_bytes())
    content[:: 1 << 16] = bytes(len(content[:: 1 << 16]))
    content[1 :: 1 << 16] = b"\1" * len(content[1 :: 1 << 16])
    (local / "train.bin").write_bytes(content)
    for path in local.iterdir():
        client.upload_file(str(path), BUCKET, f"tokens/{path.name}")
    words = ["train", *small(), "--train_data_path", "s3://bucket/tokens", "--run_dir", "run"]
    assert run_command(words) == 1
    error = capsys.readouterr().err
    assert "s3://bucket/tokens/train.bin is damaged or modified: its bytes" in error and SECRET not in error


def test_a_run_uploads_its_checkpoints_keeps_what_it_should_and_goes_on_elsewhere_with_the_same_bits(
    client: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, keep = "s3://bucket/runs/a", ("--keep_checkpoints", "2", "--no-keep_best", "--save_every", "1")
    flags = ("--train_data_path", "text", "--schedule", "constant", *keep, "--total_steps")
    wanted = train("reference", *flags, "6")
    train("first", *flags, "4", "--checkpoint_store", url)
    there = {name.split("/")[3] for name in names(client, "runs/a/checkpoints/")}
    assert "step-00000004" in there and len(there) <= 2
    assert f"runs/a/checkpoints/step-00000004/{MANIFEST}" in names(client)
    shutil.rmtree("first")
    longer = ("--allow_change", "total_steps", "--checkpoint_store", url)
    assert train("second", *flags, "6", *longer) == wanted
    assert "resuming from second/checkpoints/step-00000004" in capsys.readouterr().out
    assert run_command(["checkpoint", "list", url]) == 0
    steps = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert steps[-1] == "6" and len(steps) <= 2  # one that was saved while another was uploaded may be skipped
    on_disk = {path.name for path in Path("second/checkpoints").iterdir() if not path.name.startswith(".")}
    assert f"step-{6:08}" in on_disk
    for step in steps:
        for name in names(client, f"runs/a/checkpoints/step-{int(step):08}/"):
            path = Path("second", *name.split("/")[2:])
            if path.exists():
                assert client.get_object(Bucket=BUCKET, Key=name)["Body"].read() == path.read_bytes()
    assert client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def test_a_large_object_is_written_in_parts_and_read_back_whole_and_by_range(client: Any, tmp_path: Path) -> None:
    content = bytes(range(256)) * (2 * PART_BYTES // 256 + 5)
    (tmp_path / "large").write_bytes(content)
    store = open_store("s3://bucket/folder")
    store.put("large", tmp_path / "large")
    about = client.head_object(Bucket=BUCKET, Key="folder/large")
    assert about["ETag"].strip('"').endswith("-3") and about["ContentLength"] == len(content)
    assert store.size("large") == len(content) and store.get("large") == content
    assert store.get_range("large", PART_BYTES - 3, PART_BYTES + 9) == content[PART_BYTES - 3 : PART_BYTES + 9]
    assert abs(store.modified("large") - about["LastModified"].timestamp()) < 2
    store.download("large", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content


def test_a_folder_of_more_objects_than_one_answer_has_is_listed_whole(client: Any) -> None:
    wanted = {f"checkpoints/step-{number:08}/{MANIFEST}": 2 for number in range(1005)}
    for name in (*wanted, "other"):
        client.put_object(Bucket=BUCKET, Key=f"runs/a/{name}", Body=b"{}")
    store = open_store("s3://bucket/runs/a")
    assert store.list("checkpoints") == wanted and len(store.list()) == 1006


def test_what_is_not_there_is_named_and_removing_it_is_no_error(client: Any) -> None:
    store = open_store("s3://bucket/folder")
    store.delete("nothing")
    assert store.list() == {} and not store.exists("nothing")
    with pytest.raises(MissingObjectError, match="s3://bucket/folder/nothing does not exist"):
        store.get("nothing")
    with pytest.raises(MissingObjectError, match="s3://no-such-bucket/x does not exist"):
        open_store("s3://no-such-bucket/x").list()
    with pytest.raises(DataError, match="no such bucket"):
        open_store("s3://no-such-bucket/x").get("a")
