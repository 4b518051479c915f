"""Rows of messages become conversations; what is none is named by file and line, or skipped and counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chats import SYSTEM, opened, prepared, talk, uneven, write_chats

from drumline.data.opening import document_names, open_tokens
from drumline.data.tokenizer import Tokenizer
from drumline.errors import DataError

GOOD = talk("hi", "hello")
BAD: dict[str, tuple[Any, str]] = {
    "none": (None, "field 'messages' is null, not a list"),
    "text": ("hi", "field 'messages' is of type str, not a list"),
    "empty": ([], "has no messages"),
    "no object": (["hi"], "message 1 has no role and content"),
    "no content": ([{"role": "user"}], "message 1 has no role and content"),
    "role": ([*GOOD, {"role": "tool", "content": "x"}], "message 3 has the role 'tool'"),
    "role of a list": ([{"role": ["user"], "content": "x"}], "message 1 has the role"),
    "content": ([{"role": "user", "content": [{"type": "text"}]}, GOOD[1]], "content of message 1 is of type list"),
    "blank": (talk("hi", " \n"), "content of message 2 is empty"),
    "no answer": (talk("hi"), "the last message is from the user, not from the assistant"),
    "system later": ([*GOOD, SYSTEM, GOOD[1]], "message 3 is from the system, which only comes first"),
    "surrogate": (talk("hi", "\ud83e"), "message 2 has half of a surrogate pair (U+D83E)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_is_no_conversation_is_named_by_file_and_line_or_skipped_and_counted(
    tmp_path: Path, name: str
) -> None:
    value, problem = BAD[name]
    source = write_chats(tmp_path / "x.jsonl", [GOOD, value, GOOD])
    with pytest.raises(DataError) as refused:
        prepared(source, tmp_path / "out")
    assert refused.value.problem.startswith(f"{source}:2: ") and problem in refused.value.problem
    assert "--on_error skip" in refused.value.fix and len(str(refused.value).splitlines()) == 2
    assert not (tmp_path / "out").exists()
    made = prepared(source, tmp_path / "out", on_error="skip")
    assert made.manifest.splits["train"].documents == 2
    assert made.skipped.count == 1 and problem in made.skipped.first[0]


def test_rows_without_the_field_and_plain_text_and_builtin_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "hi"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:1 has no field 'messages'"):
        prepared(str(tmp_path / "x.jsonl"), tmp_path / "out")
    (tmp_path / "x.txt").write_text("hi")
    with pytest.raises(DataError, match=r"x\.txt: this is plain text"):
        prepared(str(tmp_path / "x.txt"), tmp_path / "out")
    with pytest.raises(DataError, match="builtin is plain text"):
        prepared("builtin", tmp_path / "out")
    with pytest.raises(DataError, match=r"has no conversations; 1 skipped, first: .*plain text"):
        prepared(str(tmp_path / "x.txt"), tmp_path / "out", on_error="skip")


def test_a_message_with_a_special_token_of_the_template_is_a_bad_row(tmp_path: Path) -> None:
    Tokenizer.train(["hi hello " * 9], vocab_size=270).save(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}assistant>{% endif %}"
    )
    source = write_chats(tmp_path / "x.jsonl", [GOOD, talk("hi<|endoftext|>", "no")])
    with pytest.raises(DataError, match=r"x\.jsonl:2: a message contains the special token <\|endoftext\|>"):
        prepared(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    made = prepared(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", on_error="skip")
    tokens = open_tokens(made.path)
    text = Tokenizer.load(made.path / "tokenizer.json").decode(tokens.tokens.tolist())
    assert text == "user>hi<|endoftext|>assistant>hello<|endoftext|>"
    assert json.loads((made.path / "chat.json").read_text())["template"].startswith("{% for m")


def test_parquet_and_json_arrays_and_functions_have_conversations_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    talks = uneven(5)
    expected = opened(write_chats(tmp_path / "x.jsonl", talks), tmp_path / "0").tokens.tolist()
    pq.write_table(pa.table({"turns": talks}), tmp_path / "x.parquet")
    (tmp_path / "x.json").write_text(json.dumps([{"messages": each} for each in talks]))
    (tmp_path / "my_chats.py").write_text(f"def rows():\n    yield from {talks!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert opened(str(tmp_path / "x.parquet"), tmp_path / "1", field="turns").tokens.tolist() == expected
    assert opened(str(tmp_path / "x.json"), tmp_path / "2").tokens.tolist() == expected
    assert opened("my_chats:rows", tmp_path / "3").tokens.tolist() == expected


@pytest.mark.parametrize("fraction", [0.02, 0.4])
def test_conversations_are_held_out_whole(tmp_path: Path, fraction: float) -> None:
    talks = uneven(8)
    source = write_chats(tmp_path / "x.jsonl", talks)
    made = prepared(source, tmp_path / "out", valid_fraction=fraction)
    assert sum(split.documents for split in made.manifest.splits.values()) == 8
    names = []
    for split in ("train", "valid"):
        tokens = open_tokens(made.path, split=split)
        names += document_names(tokens, 0, len(tokens))
    assert sorted(names) == [f"{source}:{number}" for number in range(1, 9)]


def test_one_conversation_cannot_be_held_out(tmp_path: Path) -> None:
    source = write_chats(tmp_path / "x.jsonl", [GOOD])
    with pytest.raises(DataError, match="one conversation") as refused:
        prepared(source, tmp_path / "out", valid_fraction=0.02)
    assert "--valid_fraction 0" in refused.value.fix


def test_a_flipped_byte_in_the_targets_is_noticed(tmp_path: Path) -> None:
    made = prepared(write_chats(tmp_path / "x.jsonl", uneven(3)), tmp_path / "out")
    path = made.path / "train.targets.bin"
    assert set(made.manifest.files) == {
        *("tokenizer.json", "train.bin", "train.documents.bin", "train.names.txt", "train.targets.bin", "chat.json")
    }
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.targets\.bin is damaged"):
        open_tokens(made.path)


def test_other_templates_make_other_folders_of_tokens(tmp_path: Path) -> None:
    Tokenizer.train(["hi hello " * 9], vocab_size=270).save(tmp_path / "tokenizer.json")
    source = write_chats(tmp_path / "x.jsonl", [GOOD])
    prepared(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    with pytest.raises(DataError, match="has other tokens"):
        prepared(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
