"""Text that is being encoded is bounded: what was read ahead, and not yet written, is no more than was promised."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.data import Corpus, Prepared, Progress, Recipe, Tokenizer, preparing
from drumline.encoding import ahead, parts

TEXT = "The drummer's beat {0}, é 太鼓 🥁, {0} times <|endoftext|>.\n"


def test_no_more_text_is_being_encoded_than_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = written = most = 0
    plain = parts.in_batches

    def counted(*arguments: Any) -> Iterator[Any]:
        nonlocal taken, most
        for batch in plain(*arguments):
            most = max(most, taken - written)
            taken += batch.text_bytes
            yield batch

    def note(progress: Progress) -> None:
        nonlocal written
        written = progress.text_bytes if progress.stage == "encoding" else written

    for name, size in {"FAST_BYTES": 1, "BATCH_BYTES": 3000, "REPORT_BYTES": 1000}.items():
        monkeypatch.setattr(preparing, name, size)
    monkeypatch.setattr(ahead, "ENCODING_BYTES", 9000)
    monkeypatch.setattr(parts, "in_batches", counted)
    texts = [TEXT.format(number) * (1 + number % 40) for number in range(150)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = Recipe(Corpus(str(tmp_path / "x.jsonl"), valid_fraction=0.1), Tokenizer.train(texts[:20], vocab_size=500))
    made: Prepared = preparing.prepare(recipe, tmp_path / "out", progress=note)
    assert taken == written == sum(split.text_bytes for split in made.manifest.splits.values()) > 100_000
    assert 6000 < most <= 9000
