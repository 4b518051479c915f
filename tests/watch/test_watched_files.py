"""The files of a run, read as they grow, are cut, replaced or damaged."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers.watched import BEGIN, append, iso, make_run, ranks_record, step_record
from hypothesis import given
from hypothesis import strategies as st

from drumline.watch import RunSource
from drumline.watch.columns import Columns
from drumline.watch.goodput import time_spent
from drumline.watch.lines import LineReader
from drumline.watch.ranks import RankRecords
from drumline.watch.thinning import bucket_means, curve, thin


def source_of(folder: Path) -> RunSource:
    source = RunSource(folder, folder.name)
    source.refresh()
    return source


@given(
    st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=400),
    st.integers(1, 60),
)
def test_thinning_keeps_the_extremes_of_every_bucket(values: list[float], buckets: int) -> None:
    y = np.array(values)
    kept = thin(y, buckets=buckets)
    assert list(kept) == sorted(set(kept)) and len(kept) <= 2 * buckets + 2
    assert kept[0] == 0 and kept[-1] == len(y) - 1
    size = 1 if len(y) <= 2 * buckets else -(-len(y) // buckets)
    for start in range(0, len(y), size):
        bucket, shown = y[start : start + size], y[kept[(kept >= start) & (kept < start + size)]]
        assert shown.min() == bucket.min() and shown.max() == bucket.max()


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300), st.integers(1, 40))
def test_the_means_of_buckets_lie_within_their_values(values: list[float], buckets: int) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    mean_x, mean_y = bucket_means(x, y, buckets=buckets)
    assert len(mean_x) == len(mean_y) and np.all(np.diff(mean_x) > 0)
    assert y.min() - 1e-9 <= mean_y.min() and mean_y.max() <= y.max() + 1e-9


def test_a_curve_leaves_out_what_is_no_number_and_is_in_order() -> None:
    nan = float("nan")
    found = curve(np.array([3.0, 1.0, 2.0, nan, 5.0]), np.array([30.0, 10.0, nan, 4.0, 50.0]), buckets=9, low=0, high=4)
    assert found["x"] == [1.0, 3.0] and found["y"] == [10.0, 30.0]


def test_half_a_line_waits_and_damaged_lines_are_ignored(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "loss": 4.0}\n{"step": 2, "lo\n[1]\n\xff\n{"step": "x", "loss": 1}\n{"step": 3, "loss'
    )
    source = source_of(tmp_path)
    assert source.train.column("step").tolist() == [1.0]
    with metrics.open("a") as file:
        file.write('": 2.5}\n{"step": 4, "loss": null}\n')
    source.refresh()
    assert source.train.column("step").tolist() == [1.0, 3.0, 4.0]
    assert source.train.column("loss")[1] == 2.5 and np.isnan(source.train.column("loss")[2])


def test_a_file_that_is_cut_and_grows_beyond_its_old_length_is_read_again(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append(metrics, *(step_record(step) for step in range(1, 101)))
    source = source_of(tmp_path)
    assert source.train.rows == 100
    cut = b"".join(metrics.read_bytes().splitlines(keepends=True)[:50])
    os.truncate(metrics, len(cut))
    append(metrics, *(step_record(step, loss=1.5) for step in range(51, 201)))
    source.refresh()
    assert source.train.column("step").tolist() == list(range(1, 201)) and source.generation > 0
    assert source.train.column("loss")[60] == 1.5


def test_what_is_before_the_cut_of_a_long_file_is_not_read_twice(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"".join(b"%07d %s\n" % (number, b"x" * 100) for number in range(40_000)))
    reader, lines = LineReader(tmp_path, file), []
    while read := reader.read():
        lines += read.lines
        reader.mark(len(lines))
        if not read.left_bytes:
            break
    os.truncate(file, 109 * 30_000)
    back = reader.read()
    assert back.again and 15_000 < back.back_to < 30_000
    rest = []
    while read := reader.read():
        rest += read.lines
        if not read.left_bytes:
            break
    assert lines[: back.back_to] + rest == [b"%07d %s" % (number, b"x" * 100) for number in range(30_000)]


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_is_replaced_is_read_again(tmp_path: Path, how: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append(metrics, step_record(1), step_record(2))
    source = source_of(tmp_path)
    metrics.unlink()
    if how == "removed":
        source.refresh()
        assert source.train.rows == 0
    append(metrics, step_record(1, loss=9.0), step_record(2, loss=9.0), step_record(3))
    source.refresh()
    assert source.train.rows == 3 and source.train.column("loss")[0] == 9.0


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    append(secret / "metrics.jsonl", step_record(1))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").symlink_to(secret / "metrics.jsonl")
    (run / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    os.mkfifo(run / "events.jsonl")  # and nothing waits for a pipe that nobody writes to
    source = source_of(run)
    assert source.train.rows == 0 and source.as_json()["config"] == {}


def test_columns_take_numbers_of_any_size_and_no_text() -> None:
    columns = Columns()
    columns.add([{"step": 1, "a": 10**400, "hash": "12"}, {"step": 2, "a": True, "b": [1]}, {"step": 3, "c": 7}])
    assert sorted(columns.names()) == ["a", "c", "step"] and columns.last("c") == 7.0
    columns.cut(1)
    columns.add([{"step": 9}])
    assert columns.column("step").tolist() == [1.0, 9.0] and columns.last("c") is None


def test_values_are_those_of_the_records_on_every_axis(tmp_path: Path) -> None:
    source = source_of(make_run(tmp_path / "run", steps=300))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [record for record in records if "loss" in record]
    for axis, first in (("step", 0.0), ("tokens", 0.0), ("time", losses[0]["time"])):
        found = source.curves(axis=axis)
        assert found["axes"] == ["step", "tokens", "time"]
        assert found["curves"]["loss"]["x"] == [record[axis] - first for record in losses]
        assert found["curves"]["loss"]["y"] == [record["loss"] for record in losses]
    assert found["curves"]["valid_loss"]["y"] == [each["valid_loss"] for each in records if "valid_loss" in each]


def test_a_run_of_an_earlier_version_shows_what_it_has(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    for name in ("ranks.jsonl", "samples.jsonl", "events.jsonl"):
        (run / name).unlink()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").unlink()
    append(run / "metrics.jsonl", *({k: v for k, v in each.items() if k not in ("time", "tokens")} for each in lines))
    source = source_of(run)
    shown = source.as_json()
    assert shown["goodput"] is None and shown["samples"] == [] and source.ranks.as_json() == {"count": 0}
    curves = source.curves(axis="tokens")
    assert curves["axes"] == ["step", "tokens"] and curves["curves"]["loss"]["x"][0] == 10 * 64 * 1024


def test_a_slow_rank_is_found_though_all_steps_take_the_same_time() -> None:
    records = RankRecords()
    records.add([ranks_record(10, 16, slow=5), {"step": 1, "seconds": {"data": "x"}}, {"step": 2}])
    shown = records.as_json()
    assert shown["count"] == 1 and [each["rank"] for each in shown["slow"]] == [5]
    assert shown["slow"][0]["times"] > 1.4


def test_a_slow_step_stays_visible_in_a_long_run_of_many_ranks() -> None:
    records = RankRecords()
    for step in range(3000):
        seconds = {"compute": [9.0 if (step, rank) == (777, 3) else 1.0 for rank in range(4)], "wait": [0.0] * 4}
        records.add([{"step": step, "seconds": seconds}])
    shown = records.as_json(columns=100)
    import base64

    busy = np.frombuffer(base64.b64decode(shown["busy"]), dtype="<f4").reshape(-1, 4)
    assert len(busy) <= 100 and shown["count"] == 3000 and busy.max() == 9.0 and busy[:, 3].max() == 9.0


@pytest.mark.parametrize("start", ["started", "resumed"])
def test_where_the_time_went_adds_up(tmp_path: Path, start: str) -> None:
    """1 s a step: 20 s until the first, killed in step 60 after 10 that are lost, noticed 5 s later, back after 25."""
    append(tmp_path / "metrics.jsonl", *({"step": s, "loss": 1.0, "time": BEGIN + 20 + s} for s in range(1, 51)))
    began = BEGIN + 20 + 60 + 5 + 10
    append(tmp_path / "metrics.jsonl", *({"step": s, "loss": 1.0, "time": began + s - 35} for s in range(51, 101)))
    append(tmp_path / "metrics.jsonl", {"step": 100, "valid_loss": 1.0, "eval_s": 3.0, "time": began + 68})
    append(
        tmp_path / "events.jsonl",
        {"event": "started", "step": 0, "time": iso(BEGIN)},
        {"event": "snapshot", "step": 50, "stall_s": 0.5, "time": iso(BEGIN + 70)},
        {"event": "restart", "cause": {"step": 60}, "time": iso(BEGIN + 85)},
        {"event": start, "step": 50, "pid": 2, "time": iso(began)},
        {"event": "finished", "step": 100, "time": iso(began + 68)},
    )
    found = source_of(tmp_path).goodput()
    assert found is not None and found["attempts"] == 2 and found["step_s"] == pytest.approx(1.0)
    expected = {"startup": 35, "again": 10, "down": 15, "evaluation": 3, "stalls": 0.5}
    assert {name: found["parts"][name] for name in expected} == pytest.approx(expected)
    assert sum(found["parts"].values()) == pytest.approx(found["total"]) and found["parts"]["useful"] > 95


@given(
    st.lists(
        st.tuples(st.sampled_from(["started", "resumed", "restart", "failed", "x"]), st.integers(0, 99)), max_size=9
    ),
    st.integers(0, 30),
)
def test_where_the_time_went_is_never_more_than_the_time(events: list[tuple[str, int]], rows: int) -> None:
    told = [{"event": name, "at": BEGIN + at, "step": at // 2, "cause": {"step": at}} for name, at in events]
    steps = np.arange(rows, dtype=float)
    found = time_spent(told, steps=steps, times=BEGIN + steps * 2, eval_s=1.0, stall_s=1.0, now=None)
    if found is not None:
        assert all(seconds >= 0 for seconds in found["parts"].values())
        assert sum(found["parts"].values()) == pytest.approx(found["total"])


def test_the_model_is_read_from_the_headers_of_the_newest_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step-00000020"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"versions": {"torch": "2.13"}}')
    tensors = {
        "embedding.weight": [10, 4],
        "blocks.0.attention.qkv.weight": [12, 4],
        "blocks.1.attention.qkv.weight": [12, 4],
    }
    for kind, prefix in (("model", ""), ("optimizer", "exp_avg/"), ("optimizer-2", "exp_avg_sq/")):
        header = json.dumps(
            {prefix + name: {"dtype": "F32", "shape": shape} for name, shape in tensors.items()}
        ).encode()
        (folder / f"{kind}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "model-damaged.safetensors").write_bytes(b"\xff" * 40)
    shown = source_of(tmp_path).as_json()
    assert shown["versions"] == {"torch": "2.13"} and shown["model"]["layers"] == 2
    attention, embedding = shown["model"]["parts"]
    assert attention == {"part": "attention", "parameters": 96, "weights": 384, "gradients": 384, "optimizer": 768}
    assert embedding["parameters"] == 40 and embedding["optimizer"] == 320


def test_the_data_card_opens_only_what_has_the_hash_of_the_run(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    prepared, run = tmp_path / "data", tmp_path / "run"
    prepared.mkdir()
    run.mkdir()
    Tokenizer(models.WordLevel({"end": 0, "hello": 1, "world": 2}, unk_token="end")).save(
        str(prepared / "tokenizer.json")
    )
    np.array([1, 2, 0], dtype="<u2").tofile(prepared / "train.bin")
    np.array([3], dtype="<u8").tofile(prepared / "train.documents.bin")
    (prepared / "train.names.txt").write_text("first\n")
    splits = {"train": {"tokens": 3, "documents": 1, "text_bytes": 11}}
    manifest = {"format": "drumline-tokens", "source": "s", "source_key": "k", "vocab_size": 3, "splits": splits}
    (prepared / "manifest.json").write_text(json.dumps({**manifest, "files": {"train.bin": {"sha256": "right"}}}))
    (run / "config.toml").write_text("")
    for sha256, texts in (("right", ["hello world"]), ("wrong", [])):
        (run / "data.json").write_text(json.dumps({"train": str(prepared / "train.bin"), "sha256": sha256}))
        card = source_of(run).as_json()["data"]
        assert [each["text"] for each in card.get("excerpts", [])] == texts and card["sha256"] == sha256


def test_a_start_that_resumes_is_one_start(tmp_path: Path) -> None:
    """`started` and then `resumed`, with its pid or without; a `resumed` of another process is another start."""
    for number, (of_resumed, starts) in enumerate((({}, 1), ({"pid": 7}, 1), ({"pid": 8}, 2))):
        run = tmp_path / str(number)
        run.mkdir()
        started = {"event": "started", "step": 5, "pid": 7, "time": iso(BEGIN)}
        append(run / "events.jsonl", started, {"event": "resumed", "step": 5, "time": iso(BEGIN + 1), **of_resumed})
        found = source_of(run).goodput()
        assert found is not None and found["attempts"] == starts
