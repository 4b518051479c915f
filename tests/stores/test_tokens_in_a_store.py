"""Token folders in an object store: the same bits as from a disk, whatever fails, lies or is damaged."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.large_tokens import TOKENS, large_folder, put
from helpers.object_store import KEY, SECRET, ObjectStore
from helpers.ranks import TIMEOUT_S, train_ranks
from helpers.small import small

pytest.importorskip("obstore", reason="needs obstore: pip install 'drumline[cloud]'")

from drumline.cli.app import run_command
from drumline.config.settings import DataConfig
from drumline.data.batches import BatchPlan, TokenBatches
from drumline.data.opening import open_tokens
from drumline.errors import DataError
from drumline.files.run_folder import RunFolder
from drumline.stores import ahead
from drumline.stores.mirror import mirrored

URL = "s3://bucket/sets/tokens"
PART = 1 << 14


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_folder(tmp_path_factory.mktemp("local") / "tokens")


@pytest.fixture
def store(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ahead, "MOST", 16)
    with ObjectStore() as made:
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        put(made, local, "sets/tokens")
        yield made


def train(source: str, run: str, *flags: str) -> str:
    """The hash of the weights at the end of a run."""
    words = ["--train_data_path", source, "--run_dir", run, *small("--bitwise", "--global_batch_size", "8", *flags)]
    assert run_command(["train", *words]) == 0
    return sha256(run)


def sha256(run: str) -> str:
    status = RunFolder(Path(run)).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


def parts_read(store: ObjectStore) -> int:
    return store.requests.count(("GET", "bucket/sets/tokens/train.bin"))


def opened(**settings: object) -> Path:
    return Path(mirrored(DataConfig(train_data_path=URL, **settings)).train_data_path)  # type: ignore[arg-type]


def test_a_run_from_a_store_ends_with_the_bits_of_one_from_a_disk_on_one_and_two_ranks_and_resumed(
    store: ObjectStore, local: Path
) -> None:
    wanted = train(str(local), "local")
    assert train(URL, "one") == wanted
    shutil.rmtree("data")
    assert train(URL, "resumed", "--save_every", "3") == wanted
    shutil.rmtree(RunFolder(Path("resumed")).checkpoint(6))
    shutil.rmtree("data")
    assert train(URL, "resumed", "--save_every", "3") == wanted
    shutil.rmtree("data")
    words = small("--bitwise", "--global_batch_size", "8", "--batch_size", "4")
    outcomes = train_ranks(2, "--train_data_path", URL, "--run_dir", "two", *words, environ=store.environ)
    assert all(each.code == 0 for each in outcomes), outcomes[0].err + outcomes[1].err
    assert sha256("two") == wanted
    assert f'train_data_path = "{URL}"' in Path("two/config.toml").read_text()


@pytest.mark.parametrize(
    ("url", "place", "opens", "environ"),
    [
        ("HOST/shared/tokens", "shared/tokens", "Basic dXNlcjpjYW5hcnk=", {"NETRC": "netrc"}),
        ("hf://datasets/some/one/tokens", "datasets/some/one/resolve/main/tokens", "Bearer canary", {
            "HF_ENDPOINT": "HOST", "HF_TOKEN": "canary",
        }),
        ("gs://bucket/sets/tokens", "bucket/sets/tokens", "", {
            "STORAGE_EMULATOR_HOST": "HOST", "GOOGLE_BASE_URL": "HOST", "GOOGLE_SKIP_SIGNATURE": "true",
        }),
        ("az://bucket/sets/tokens", "devstoreaccount1/bucket/sets/tokens", "SharedKey devstoreaccount1:", {
            "AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": "HOST", "AZURE_ENDPOINT": "HOST",
        }),
    ],
    ids=["http", "hf", "gs", "az"],
)  # fmt: skip
def test_tokens_on_the_web_the_hub_and_other_clouds_give_the_bits_of_a_run_from_a_disk(
    store: ObjectStore, local: Path, monkeypatch: pytest.MonkeyPatch, url: str, place: str, opens: str,
    environ: dict[str, str],
) -> None:  # fmt: skip
    host = f"http://127.0.0.1:{store.port}"
    Path("netrc").write_text("machine 127.0.0.1 login user password canary\n")
    for name, value in environ.items():
        monkeypatch.setenv(name, value.replace("HOST", host))
    store.objects = {name.replace("bucket/sets/tokens", place): each for name, each in store.objects.items()}
    store.opens = opens
    assert train(url.replace("HOST", host), "remote") == train(str(local), "local")
    assert ("GET", f"{place}/train.bin") in store.requests


def test_validation_data_and_evaluation_are_read_from_a_store(
    store: ObjectStore, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(str(local), "local", "--valid_data_path", str(local))
    train(str(local), "stored", "--valid_data_path", URL)
    assert train(str(local), "local") == train(str(local), "stored")
    capsys.readouterr()
    said = []
    for source in (str(local), URL, f"{URL}/valid.bin"):
        assert run_command(["evaluate", "local", "--data", source]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and "loss" in said[0]


def test_the_whole_file_is_read_as_it_is_and_a_second_time_from_the_cache_alone(
    store: ObjectStore, local: Path
) -> None:
    wanted = np.fromfile(local / "train.bin", dtype="<u2")
    tokens = open_tokens(opened())
    assert len(tokens) == len(wanted) > TOKENS and tokens.sha256 == open_tokens(local).sha256
    for start, stop in ((0, 1), (32767, 32769), (len(wanted) - 5, len(wanted)), (0, len(wanted)), (7, 7)):
        assert np.array_equal(tokens.read(start, stop), wanted[start:stop])
    before = parts_read(store)
    assert before > 10
    again = open_tokens(opened())
    assert np.array_equal(again.read(0, len(wanted)), wanted)
    assert parts_read(store) == before


def test_opening_a_terabyte_in_a_store_reads_its_manifest_and_tokenizer_alone(store: ObjectStore, local: Path) -> None:
    about = json.loads((local / "manifest.json").read_text())
    size = 10**12
    about["files"]["train.bin"]["bytes"], about["splits"]["train"]["tokens"] = size, size // 2
    store.objects["bucket/sets/tokens/manifest.json"] = json.dumps(about).encode()
    store.objects["bucket/sets/tokens/train.bin"] = Zeros(size)  # type: ignore[assignment]
    tokens = open_tokens(opened())
    assert len(tokens) == size // 2
    assert {name.rpartition("/")[2] for method, name in store.requests if method == "GET"} == {
        *("manifest.json", "tokenizer.json")
    }


class Zeros:
    """What a server needs of a terabyte."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: slice) -> bytes:
        return bytes(place.stop - place.start)


def test_a_damaged_file_of_the_cache_is_noticed_and_fetched_again(store: ObjectStore, local: Path) -> None:
    wanted = open_tokens(local).read(0, 50_000)
    folder = opened()
    open_tokens(folder).read(0, 50_000)
    (region,) = (folder / "parts/train.bin").iterdir()
    content = bytearray(region.read_bytes())
    content[PART + 5] ^= 1  # part 1
    region.write_bytes(content[: 4 * PART + 9])  # and what comes after part 3 is gone
    before = parts_read(store)
    assert np.array_equal(open_tokens(folder).read(0, 50_000), wanted)
    assert parts_read(store) == before + 2
    assert np.array_equal(open_tokens(folder).read(0, 50_000), wanted)
    assert parts_read(store) == before + 2
    (folder / "tokenizer.json").write_text("{}")
    assert (opened() / "tokenizer.json").read_bytes() == (local / "tokenizer.json").read_bytes()


def test_the_cache_has_at_most_the_bytes_that_it_may_have(store: ObjectStore, local: Path) -> None:
    folder, most = opened(cache_gb=0.006), 6_000_000
    wanted, tokens, sizes = np.fromfile(local / "train.bin", dtype="<u2"), open_tokens(folder), []
    for number in range(len(wanted) * 2 // PART):
        at = number * 7 % (len(wanted) * 2 // PART) * PART // 2
        assert np.array_equal(tokens.read(at, at + 100), wanted[at : at + 100])
        sizes.append(sum(path.stat().st_blocks * 512 for path in (folder / "parts").glob("*/*")))
    assert most / 3 < sizes[-1] and max(sizes) <= most
    shutil.rmtree(folder.parent.parent)
    tokens = open_tokens(opened(cache_gb=0.0))
    assert np.array_equal(tokens.read(0, 100), wanted[:100]) and not (folder / "parts").exists()


def test_a_store_that_lies_once_is_asked_again_and_one_that_keeps_lying_is_refused_by_name(
    store: ObjectStore, local: Path
) -> None:
    true = store.objects["bucket/sets/tokens/train.bin"]
    lie = bytearray(true)
    lie[3 * PART + 11] ^= 4
    wanted, lies = open_tokens(local), [1]

    def some(method: str, name: str, body: bytes) -> None:
        if method == "GET" and name.endswith("train.bin"):
            store.objects[name] = bytes(lie) if lies and lies.pop() else true

    store.fault = some
    tokens, place = open_tokens(opened()), 3 * PART // 2
    assert np.array_equal(tokens.read(place, place + 99), wanted.read(place, place + 99))
    shutil.rmtree("data")
    lies += [1] * 9
    tokens = open_tokens(opened())
    with pytest.raises(DataError) as refused:
        tokens.read(place, place + 99)
    assert refused.value.problem == (
        f"{URL}/train.bin is damaged or modified: its bytes {3 * PART:,} to {4 * PART:,} are not those that were "
        "prepared (read 3 times)"
    )
    assert len(lies) == 6
    lies.clear()  # the store is put in order, and whoever asks again gets what is right
    assert np.array_equal(tokens.read(place, place + 99), wanted.read(place, place + 99))
    store.objects["bucket/sets/tokens/tokenizer.json"] = b"{}"
    shutil.rmtree("data")
    with pytest.raises(DataError, match=r"s3://bucket/sets/tokens/tokenizer.json is not what was prepared"):
        opened()


def test_a_store_that_fails_again_and_again_costs_no_token(store: ObjectStore, local: Path) -> None:
    asked = threading.Lock()
    numbers = iter(range(10**6))

    def fault(method: str, name: str, body: bytes) -> int | None:
        with asked:
            return (500, None, None, 503, None, None)[next(numbers) % 6]

    store.fault = fault
    assert train(URL, "failing") == train(str(local), "local")
    assert next(numbers) > 20


def test_a_store_that_is_gone_ends_the_run_in_two_lines(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRUMLINE_STORE_PATIENCE_S", "0.3")
    store.fault = lambda method, name, body: 500 if name.endswith("train.bin") and method == "GET" else None
    assert run_command(["train", "--train_data_path", URL, "--run_dir", "run", *small()]) == 1
    problem, fix = capsys.readouterr().err.strip().splitlines()[-2:]
    assert f"{URL}/train.bin could not be read: it answered 500" in problem and "tried" in problem
    assert "check the URL" in fix


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://me:canary-in-the-url@bucket/tokens", "with a user, password or query"),
        ("s3://bucket/elsewhere", "s3://bucket/elsewhere is no folder of tokens: it has no manifest.json"),
        ("s3://nowhere/tokens", "no such bucket"),
        ("ftp://bucket/tokens", "ftp:// is not known"),
    ],
)
def test_a_url_that_cannot_be_right_is_refused(
    store: ObjectStore, url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "--train_data_path", url, "--run_dir", "run", *small()]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and "canary" not in captured.err + captured.out
    assert not Path("run").exists()


def test_a_mix_of_stores_and_folders_has_the_bits_of_the_same_mix_of_folders(
    store: ObjectStore, local: Path, tmp_path: Path
) -> None:
    other = large_folder(tmp_path / "other", seed=1)
    flags = ["--stages", "50%- tokens:0.2,other:0.8"]
    wanted = train(f"{local}:0.7,{other}:0.3", "local", *flags)
    assert train(f"{URL}:0.7,{other}:0.3", "mixed", *flags) == wanted
    put(store, other, "other")
    shutil.rmtree("data")
    assert train(f"{URL}:0.7,s3://bucket/other:0.3", "stored", *flags) == wanted
    assert f'path = "{URL}"' in Path("stored/config.toml").read_text() or URL in Path("stored/config.toml").read_text()
    assert run_command(["data", "show", "stored"]) == 0


def test_documents_are_packed_and_named_from_a_store(store: ObjectStore, local: Path) -> None:
    flags = ["--packing", "best_fit", "--document_mask"]
    folder = shutil.copytree(local, "copied")
    assert train(URL, "stored", *flags) == train(str(folder), "local", *flags)
    own, plan = open_tokens(opened()), BatchPlan(4, 2)
    there, here = (TokenBatches(each, plan, context=16, seed=0) for each in (own, open_tokens(local)))
    assert there.names(3) == here.names(3) != []


def test_no_file_of_a_run_or_of_its_cache_has_a_credential(
    store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    train(URL, "run", "--save_every", "3")
    said = capsys.readouterr()
    files = [Path(folder, name) for top in ("run", "data") for folder, _, names in os.walk(top) for name in names]
    assert len(files) > 10
    for content in (said.out.encode(), said.err.encode(), *(path.read_bytes() for path in files)):
        assert SECRET.encode() not in content and KEY.encode() not in content


def test_a_dry_run_reads_nothing_but_what_says_what_the_tokens_are(
    store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*small("--epochs", "1"), "--dry_run"]
    assert run_command(["train", "--train_data_path", URL, "--run_dir", "run", *words]) == 0
    assert "132," in capsys.readouterr().err  # thousand steps of 4 x 16 tokens
    assert parts_read(store) == 0


def test_batches_are_made_ahead_while_the_step_uses_one(store: ObjectStore, local: Path) -> None:
    plan, stored, here = BatchPlan(2, 2), open_tokens(opened()), open_tokens(local)
    batches = ahead.read_ahead(TokenBatches, total_steps=11)(stored, plan, context=16, seed=3)
    wanted = TokenBatches(here, plan, context=16, seed=3)

    def same(step: int) -> None:
        for index in (0, 1):
            (ids, targets, _), right = batches.micro_batch(step, index), wanted.micro_batch(step, index)
            assert ids.equal(right[0]) and targets.equal(right[1])

    for step in (0, 1, 2):
        same(step)
    made = vars(batches)["micro_batch"]._made
    for future in list(made.values()):
        future.result(timeout=TIMEOUT_S)
    assert set(made) == {(step, index) for step in range(3, 11) for index in (0, 1)}
    store.fault = lambda method, name, body: 403  # what is made ahead needs no store any more, and no more is asked for
    for step in range(3, 11):
        same(step)
    store.fault = lambda method, name, body: None
    for step in (1, 2, 11):  # a run that goes back to an earlier checkpoint
        same(step)
    assert not made  # nothing after the last step
