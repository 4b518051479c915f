"""Windows of whole documents: nothing lost, nothing cut that fits, the same on every machine, little padding."""

from __future__ import annotations

import multiprocessing
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.steps import make_step, train_step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from drumline.config.model import GPTConfig
from drumline.data.batches import BatchPlan, window_batch
from drumline.data.tokens import TokenFile
from drumline.errors import DataError
from drumline.model.build import token_objective
from drumline.model.gpt import GPT
from drumline.packing.batches import PackedBatches
from drumline.packing.best_fit import best_fit
from drumline.packing.index import Index, open_index
from drumline.packing.tokens import PackedTokens

LENGTHS = [5, 1, 16, 40, 3, 9, 2, 31, 7, 7, 12, 1, 17]
END = 0


def token_file(folder: Path, lengths: list[int]) -> TokenFile:
    """Documents of these lengths, with their end-of-text tokens."""
    ends = np.cumsum(lengths).astype("<u8")
    tokens = (np.arange(ends[-1]) % 50 + 1).astype("<u2")
    tokens[ends.astype(np.int64) - 1] = END
    names = folder / "train.names.txt"
    names.write_text("".join(f"document {number}\n" for number in range(len(lengths))))
    return TokenFile(
        folder / "train.bin", tokens, end_of_text=END, sha256="0" * 64, document_ends=ends, names_path=names
    )


def packed(file: TokenFile, context: int) -> PackedTokens:
    values = {each.name: getattr(file, each.name) for each in fields(TokenFile)}
    return PackedTokens(**values, source=file, index=open_index(file, context=context))


def every(index: Index) -> list[list[tuple[int, int]]]:
    return [index.segments(window) for window in range(index.about.windows)]


def decreasing(lengths: list[int], context: int, *, tightest: bool) -> list[int]:
    """Space left in each window by best fit, or first fit, piece by piece."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[min(fitting, key=lambda place: spaces[place]) if tightest else fitting[0]] -= length
        else:
            spaces.append(context - length)
    return sorted(spaces)


@given(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_groups_of_windows_are_those_of_best_fit_decreasing_piece_by_piece(context: int, lengths: list[int]) -> None:
    lengths = [min(length, context) for length in lengths]
    groups = best_fit(np.bincount(lengths, minlength=context + 1).tolist(), context=context)
    spaces = [context - sum(n * times for n, times in group.content) for group in groups for _ in range(group.windows)]
    assert sorted(spaces) == decreasing(lengths, context, tightest=True)


@settings(max_examples=60, deadline=None)
@given(context=st.integers(1, 24), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_every_token_is_in_one_segment_and_what_fits_is_whole(
    tmp_path_factory: pytest.TempPathFactory, context: int, lengths: list[int]
) -> None:
    file = token_file(tmp_path_factory.mktemp("tokens"), lengths)
    index = open_index(file, context=context)
    windows = every(index)
    segments = [segment for window in windows for segment in window]
    covered = np.concatenate([np.arange(start, start + length) for start, length in segments])
    assert sorted(covered.tolist()) == list(range(len(file)))
    assert all(0 < sum(length for _, length in window) <= context for window in windows)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    fitting = {(start, length) for start, length in zip(starts, lengths, strict=True) if length <= context}
    assert fitting <= set(segments) and index.about.whole == len(fitting)
    pieces = [length for _, length in segments]
    assert len(windows) == len(decreasing(pieces, context, tightest=True))
    spans = [(max(start - 1, 0), max(start + n - 2, 0)) for start, n in zip(starts, lengths, strict=True)]
    assert index.about.whole_in_stream == sum(a // context == b // context for a, b in spans)


def test_best_fit_has_no_more_padding_than_first_fit_in_the_order_of_the_file(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 33, 500).tolist()
    spaces: list[int] = []
    for length in lengths:
        place = next((place for place, space in enumerate(spaces) if space >= length), None)
        if place is None:
            spaces.append(32)
            place = -1
        spaces[place] -= length
    assert open_index(token_file(tmp_path, lengths), context=32).about.windows <= len(spaces)


def test_the_index_has_the_same_bytes_every_time_and_is_computed_once(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        file = token_file(tmp_path / name, LENGTHS * 20)
        first = open_index(file, context=16)
        path = tmp_path / name / "train.packed-16.bin"
        was = path.stat().st_ino
        assert every(open_index(file, context=16)) == every(first) and path.stat().st_ino == was
        contents.append(path.read_bytes())
        assert sorted(p.name for p in path.parent.iterdir() if "packed" in p.name) == [
            path.name,
            "train.packed-16.json",
        ]
    assert contents[0] == contents[1]
    order = [window[0][0] for window in every(first)]
    assert order != sorted(order)  # neighbours in the file are not neighbours in the windows


@pytest.mark.parametrize("damage", ["flipped", "cut", "no json", "other tokens", "not json", "list"])
def test_an_index_that_is_damaged_or_of_other_tokens_is_replaced(tmp_path: Path, damage: str) -> None:
    file = token_file(tmp_path, LENGTHS)
    right = every(open_index(file, context=16))
    path, about = tmp_path / "train.packed-16.bin", tmp_path / "train.packed-16.json"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[20] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "no json":
        about.unlink()
    else:
        text = about.read_text()
        texts = {"other tokens": text.replace("0" * 64, "1" * 64), "not json": "{", "list": "[]"}
        about.write_text(texts[damage])
    assert every(open_index(file, context=16)) == right and path.read_bytes() != b""
    assert '"tokens_sha256": "' + "0" * 64 in about.read_text()


def _open(folder: Path) -> None:
    open_index(token_file(folder, LENGTHS * 2000), context=16)


def test_two_processes_that_compute_it_at_once_both_get_it(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    token_file(tmp_path, LENGTHS * 2000)
    both = [spawn.Process(target=_open, args=(tmp_path,)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(60)
    assert [each.exitcode for each in both] == [0, 0]
    assert not list(tmp_path.glob(".*"))
    assert len(every(open_index(token_file(tmp_path, LENGTHS * 2000), context=16)))


def test_it_goes_to_another_folder_if_it_cannot_be_beside_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    file = token_file(tmp_path / "tokens", LENGTHS)
    (tmp_path / "tokens" / "train.packed-16.json").mkdir()  # cannot be replaced, by root neither
    first = open_index(file, context=16, other_folder=tmp_path / "data")
    assert (tmp_path / "data" / f"packed-{'0' * 12}" / "train.packed-16.bin").exists()
    assert every(open_index(file, context=16, other_folder=tmp_path / "data")) == every(first)
    with pytest.raises(DataError, match="is not writable"):
        open_index(file, context=16)


@pytest.mark.parametrize("masks", [True, False])
def test_a_window_has_each_document_after_an_end_of_text(tmp_path: Path, masks: bool) -> None:
    tokens = packed(token_file(tmp_path, LENGTHS), 16)
    windows = range(tokens.windows(16))
    inputs, targets, documents = window_batch(tokens, windows, context=16, end_of_text=END if masks else None)
    assert inputs.shape == targets.shape == (len(windows), 16) and (documents is not None) == masks
    for row, window in enumerate(windows):
        place = 0
        for number, (start, length) in enumerate(tokens.index.segments(window)):
            here = slice(place, place + length)
            assert targets[row, here].tolist() == tokens.tokens[start : start + length].tolist()
            before = END if start == 0 else int(tokens.tokens[start - 1])
            assert inputs[row, here].tolist() == [before, *tokens.tokens[start : start + length - 1].tolist()]
            assert documents is None or set(documents[row, here].tolist()) == {number}
            place += length
        assert (targets[row, place:] == -100).all() and (inputs[row, place:] == END).all()
        assert documents is None or place == 16 or set(documents[row, place:].tolist()) == {number + 1}


@pytest.mark.parametrize("plan", [BatchPlan(2, 2), BatchPlan(4, 1)], ids=["2 x 2", "4 x 1"])
def test_the_loss_of_a_step_is_the_mean_over_its_tokens_without_padding(tmp_path: Path, plan: BatchPlan) -> None:
    tokens = packed(token_file(tmp_path, [9, 9, 11, 13, 9, 14, 2]), 16)
    torch.manual_seed(0)
    shape = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 32, "max_position_embeddings": 16}
    model = GPT(GPTConfig(vocab_size=64, **shape))  # type: ignore[arg-type]
    batches = PackedBatches(tokens, plan, context=16, seed=0, document_mask=True)
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.0), token_objective, weight=4 * 16)
    result = train_step(step, (batches.micro_batch(0, index) for index in range(plan.micro_batches)), lr=0.0)
    losses, padding = [], 0
    with torch.no_grad():
        for window in batches.windows(0):
            padding += 16
            for start, length in tokens.index.segments(window):
                ids = torch.tensor([END, *tokens.tokens[start : start + length].tolist()])
                losses.append(F.cross_entropy(model(ids[None, :-1])[0][0], ids[1:], reduction="none"))
                padding -= length
    assert padding > 0
    assert result.loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_an_epoch_visits_every_window_once_and_its_documents_are_named(tmp_path: Path) -> None:
    tokens = packed(token_file(tmp_path, LENGTHS), 16)
    batches = PackedBatches(tokens, BatchPlan(1, 1), context=16, seed=3)
    visited = [batches.windows(step)[0] for step in range(batches.items)]
    assert sorted(visited) == list(range(tokens.windows(16)))
    starts = np.cumsum([0, *LENGTHS]).tolist()
    for step, window in enumerate(visited):
        inside = [max(n for n, at in enumerate(starts) if at <= start) for start, _ in tokens.index.segments(window)]
        assert batches.names(step) == [f"document {number}" for number in inside]


def test_short_contexts_split_packed_windows_as_they_split_the_stream(tmp_path: Path) -> None:
    batches = PackedBatches(packed(token_file(tmp_path, LENGTHS), 16), BatchPlan(2, 1), context=16, seed=0)
    whole = batches.micro_batch(0, 0)
    batches.short_steps = 1
    short = batches.micro_batch(0, 0)
    assert short[0].shape == (8, 4) and torch.equal(short[1].reshape(2, 16), whole[1]) and short[3] == whole[3]


def test_tokens_packed_for_another_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="packed for a context of 16, not of 8"):
        packed(token_file(tmp_path, LENGTHS), 16).windows(8)
