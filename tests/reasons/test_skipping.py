"""Skip lists: the visit order without some documents is still a function of seed and step."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.data.batches import BatchPlan, TokenBatches
from drumline.data.tokens import TokenFile
from drumline.errors import DataError
from drumline.reasons.skipping import Skipped, SkippingBatches, read_skip_list, without_skipped, write_skip_list

SHA256 = "ab" * 32


def tokens_of(count: int) -> TokenFile:
    return TokenFile(Path("train.bin"), np.arange(count, dtype=np.uint16), sha256=SHA256)


@given(
    count=st.integers(40, 300),
    context=st.integers(2, 9),
    start=st.integers(0, 299),
    length=st.integers(1, 12),
    seed=st.integers(0, 99),
    size=st.integers(1, 5),
)
def test_an_epoch_visits_every_other_window_once_and_no_token_of_the_document(
    tmp_path_factory: pytest.TempPathFactory, count: int, context: int, start: int, length: int, seed: int, size: int
) -> None:
    start, tokens = min(start, count - 1), tokens_of(count)
    stop, path = min(count, start + length), tmp_path_factory.getbasetemp() / "list.json"
    path.unlink(missing_ok=True)
    write_skip_list(path, tokens, [Skipped(start, stop, "bad")])
    plain = TokenBatches(tokens, BatchPlan(1, 1), context=context, seed=seed)
    batches = without_skipped(str(path))(tokens, BatchPlan(size, 1), context=context, seed=seed)
    touching = {w for w in range(plain.items) if {*range(start, stop)} & {*range(w * context, (w + 1) * context + 1)}}
    assert batches.items == plain.items - len(touching)
    one_by_one = SkippingBatches(path, tokens, BatchPlan(1, 1), context=context, seed=seed)
    epoch = [one_by_one.windows(step)[0] for step in range(batches.items)]
    assert sorted(epoch) == sorted({*range(plain.items)} - touching)
    for step in range(3):  # a step's windows do not depend on how steps are cut
        assert batches.windows(step) == [one_by_one.windows(step * size + n)[0] for n in range(size)]
        inputs, targets, _ = batches.micro_batch(step, 0)
        seen = {*inputs.flatten().tolist(), *targets.flatten().tolist()}
        assert not seen & {*range(start, stop)}


def test_a_list_grows_and_one_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    tokens, path = tokens_of(50), tmp_path / "list.json"
    write_skip_list(path, tokens, [Skipped(0, 10, "a")])
    write_skip_list(path, tokens, [Skipped(20, 30, "b")])
    assert [each.name for each in read_skip_list(path, tokens).documents] == ["a", "b"]
    write_skip_list(path, tokens, [Skipped(0, 50, "all")])
    with pytest.raises(DataError, match="leaves none of the 12 sequences"):
        SkippingBatches(path, tokens, BatchPlan(1, 1), context=4, seed=0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "cannot be read"),
        ("[]", "is not a skip list"),
        ('{"format": "drumline-skip-list", "format_version": 9}', "format version 9"),
        ('{"format": "drumline-skip-list", "format_version": 1}', "is damaged: KeyError"),
        ({"start": "1", "stop": 2, "name": "x"}, "is damaged: TypeError"),
        ({"start": True, "stop": 2, "name": "x"}, "is damaged: TypeError"),
        ({"start": 5, "stop": 5, "name": "x"}, "tokens 5 to 5"),
        ({"start": -1, "stop": 5, "name": "x"}, "tokens -1 to 5"),
        ({"start": 1, "stop": 51, "name": "x"}, "but train.bin has 50"),
        (None, "No such file"),
    ],
)
def test_what_is_no_list_for_these_tokens_is_refused(tmp_path: Path, content: object, problem: str) -> None:
    path = tmp_path / "list.json"
    if isinstance(content, dict):
        about = {"format": "drumline-skip-list", "format_version": 1, "tokens_sha256": SHA256}
        content = json.dumps({**about, "documents": [content]})
    if content is not None:
        path.write_text(str(content))
    with pytest.raises(DataError) as refused:
        read_skip_list(path, tokens_of(50))
    assert problem in refused.value.problem and refused.value.fix
