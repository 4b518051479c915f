"""What a conversation needs: text that stops in time, and messages as a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.chats.templates import ChatTemplate
from drumline.data.tokenizer import Tokenizer
from drumline.errors import DataError
from drumline.generate.stops import StoppingText

BYTES = Tokenizer.train(["aab ab aab 鼓 " * 20], vocab_size=270)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}<|assistant|>"
)


@given(st.text("ab \n鼓", max_size=30), st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=3))
def test_pieces_joined_are_the_text_before_the_stop_string_that_is_complete_first(text: str, stops: list[str]) -> None:
    writing, pieces = StoppingText(BYTES, stops), []
    for token in BYTES.encode(text):
        pieces.append(writing.push(token))
        assert text.startswith("".join(pieces))
        if writing.stopped:
            break
    pieces.append(writing.flush())
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)
    assert writing.stopped == bool(ends)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with special tokens and a template, as Hugging Face models have them."""
    BYTES.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for number, name in enumerate(("<|user|>", "<|assistant|>", "<|end|>"), start=300):
        content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": name})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = {"chat_template": TEMPLATE, "bos_token": None, "eos_token": {"content": "<|end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_template_beside_the_tokenizer_writes_special_tokens_and_its_end_ends_an_answer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    template = ChatTemplate(tokenizer, folder)
    ids = template.encode([{"role": "user", "content": "ab"}])
    size = tokenizer.vocab_size
    user, assistant, end = range(size - 3, size)
    assert ids == [user, *tokenizer.encode("ab"), end, assistant]
    assert template.ends == (tokenizer.end_of_text, end) and template.stops == ()
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert tokenizer.decode(ChatTemplate(tokenizer, folder).encode([{"role": "user", "content": "ab"}])) == "ab!"


@pytest.mark.parametrize(
    ("template", "content", "problem"),
    [
        (TEMPLATE, "so <|end|>", "special token <|end|>"),
        ("{{ raise_exception('no system message') }}", "ab", "no system message"),
        ("{{ messages.__class__.__mro__ }}", "ab", "refuses"),
    ],
)
def test_what_a_message_or_a_template_must_not_do_is_refused(
    folder: Path, template: str, content: str, problem: str
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError) as refused:
        ChatTemplate(Tokenizer.load(folder / "tokenizer.json"), folder).encode([{"role": "user", "content": content}])
    assert problem.rsplit(maxsplit=1)[-1] in str(refused.value)


def test_a_template_that_is_none_is_refused_when_it_is_loaded(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="chat template"):
        ChatTemplate(BYTES, folder)


def test_a_long_conversation_loses_its_oldest_turns_but_not_the_system_message() -> None:
    template = ChatTemplate(BYTES)
    talk = [{"role": "system", "content": "s"}]
    talk += [{"role": ("user", "assistant")[n % 2], "content": f"turn {n}"} for n in range(9)]
    text = BYTES.decode(template.fitting(talk, context=120))
    assert text.startswith("System: s\nUser: turn ") and text.endswith("\nUser: turn 8\nAssistant:")
    assert "turn 0" not in text and len(BYTES.encode(text)) <= 90
    assert BYTES.decode(template.fitting(talk, context=10**6)).count("turn") == 9
    assert "turn 8" in BYTES.decode(template.fitting(talk, context=8))
