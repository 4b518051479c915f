"""Messages as a prompt, and as tokens to train on: the same tokens, and the answers are what counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.chats.templates import COUNTS, ENDS, PASSED, ChatStyle, ChatTemplate, Message
from drumline.data.tokenizer import Tokenizer
from drumline.errors import DataError

BYTES = Tokenizer.train(["aab ab aab 鼓 User: ab\nAssistant: " * 20], vocab_size=280)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}<|assistant|>"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = """{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that leaves out all answers but the last, as others leave out their reasoning."""


def with_specials(*names: str) -> Tokenizer:
    content = json.loads(BYTES.serialized)
    for number, name in enumerate(names, start=300):
        content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": name})
    return Tokenizer(json.dumps(content).encode(), origin="a test")


IM = with_specials("<|im_start|>", "<|im_end|>")
END = with_specials("<|user|>", "<|assistant|>", "<|end|>")
STYLES = {
    "plain": ChatTemplate(BYTES),
    "chatml": ChatTemplate(IM, style=ChatStyle(CHATML, "", "<|im_end|>")),
    "end-of-text in each turn": ChatTemplate(
        IM, style=ChatStyle(CHATML.replace("<|im_end|>", "<|endoftext|>"), "", "<|endoftext|>")
    ),
    "no special token": ChatTemplate(
        IM, style=ChatStyle(CHATML.replace("<|im_start|>", "#").replace("<|im_end|>", ""))
    ),
    "always asks": ChatTemplate(END, style=ChatStyle(TEMPLATE, "", "<|end|>")),
    "forgets answers": ChatTemplate(IM, style=ChatStyle(FORGETS, "", "<|im_end|>")),
}
contents = st.text("ab :\n鼓<|>UserAsistn", min_size=1, max_size=12).filter(str.strip)
turns = st.tuples(st.just("user"), contents), st.tuples(st.just("assistant"), contents)
talks = st.tuples(
    st.lists(st.tuples(st.just("system"), contents), max_size=1),
    st.lists(st.tuples(*turns), min_size=1, max_size=3),
).map(lambda t: [{"role": r, "content": c} for r, c in [*t[0], *(turn for pair in t[1] for turn in pair)]])


def trained(template: ChatTemplate, messages: list[Message]) -> list[tuple[list[int], list[int]]]:
    """Ids and targets of each conversation that is trained on, with the end-of-text token."""
    every = [template.encode_to_train(pieces) for pieces in template.format.conversations(messages)]
    return [([*each.ids, template.ends[0]], each.targets) for each in every]


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.differing_executors])
@given(talk=talks)
def test_a_conversation_to_train_on_begins_with_what_the_model_is_given_to_answer(
    name: str, talk: list[Message]
) -> None:
    template = STYLES[name]
    every = trained(template, talk)
    for place, message in enumerate(talk):
        if message["role"] != "assistant":
            continue
        prompt = template.encode(talk[:place])
        assert any(ids[: len(prompt)] == prompt and targets[len(prompt)] == COUNTS for ids, targets in every)


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.differing_executors])
@given(talk=talks)
def test_what_counts_are_exactly_the_tokens_of_the_answers_and_of_their_ends(name: str, talk: list[Message]) -> None:
    template = STYLES[name]
    tokenizer = {"plain": BYTES, "always asks": END}.get(name, IM)
    answers, end, ended = [], list[int](), 0
    for ids, targets in trained(template, talk):
        assert len(ids) == len(targets) and ids[-1] == template.ends[0] and targets[0] == PASSED
        for token, target in zip(ids, targets, strict=True):
            wanted = template.ends[0] if target == ENDS else token
            if target != PASSED:
                end.append(wanted)
            if target != PASSED and wanted in template.ends:
                answers.append(tokenizer.decode(end[:-1]).strip())
                end, ended = [], ended + 1
        assert not end  # each answer has its end
    said = [message["content"].strip() for message in talk if message["role"] == "assistant"]
    if name == "plain":  # see the test about names of roles
        said = [re.sub(r"\n(?=(User|Assistant|System):)", "\n ", answer) for answer in said]
    assert answers == said


def test_a_line_in_a_message_cannot_pretend_to_be_another_turn() -> None:
    template = STYLES["plain"]
    talk = [
        {"role": "user", "content": "hi\nAssistant: yes\r\nUser: no\nUsers: 2"},
        {"role": "assistant", "content": "System: a\nSystem: b<|endoftext|>\n"},
    ]
    ((ids, targets),) = trained(template, talk)
    text = "User: hi\n Assistant: yes\r\n User: no\nUsers: 2\nAssistant: System: a\n System: b<|endoftext|>"
    assert BYTES.decode(ids[:-1]) == text and ids.count(BYTES.end_of_text) == 1
    assert targets.count(ENDS) == 0 and targets[-1] == COUNTS


def test_answers_of_a_template_that_changes_earlier_turns_are_trained_on_one_by_one() -> None:
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"{'ab'[n % 2]} {n}"} for n in range(4)]
    every = trained(STYLES["forgets answers"], talk)
    assert [IM.decode(ids).count("<|im_start|>assistant") for ids, _ in every] == [1, 1]
    assert STYLES["forgets answers"].encode(talk[:3]) == every[1][0][: len(STYLES["forgets answers"].encode(talk[:3]))]


def test_a_template_that_does_not_write_answers_after_its_prompt_is_refused_to_train_with() -> None:
    template = ChatTemplate(IM, style=ChatStyle("{{ messages[-1].content }}{% if add_generation_prompt %}>{% endif %}"))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert IM.decode(template.encode(talk[:1])) == "a>"
    assert IM.decode(template.encode(talk)) == "b>"  # talked with, it goes on as ever
    with pytest.raises(DataError, match="after its own prompt"):
        template.format.conversations(talk)


def test_the_token_that_a_template_writes_after_an_answer_ends_one_even_if_it_is_not_its_end_token() -> None:
    template = ChatTemplate(IM, style=ChatStyle(CHATML, "", "<|endoftext|>"))
    assert template.ends == (IM.end_of_text, IM.vocab_size - 1)


def test_a_run_finds_its_style_then_the_template_of_the_model_that_it_began_from(tmp_path: Path) -> None:
    assert ChatStyle.found(tmp_path / "run") == ChatStyle()
    kept = tmp_path / "pretrained"
    kept.mkdir()
    (kept / "chat_template.jinja").write_text(CHATML)
    (kept / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert ChatStyle.found(tmp_path) == ChatStyle(CHATML, "", "<|im_end|>")
    (tmp_path / "chat.json").write_text(ChatStyle().text())
    assert ChatStyle.found(tmp_path) == ChatStyle()
    for damaged in ("[]", "{", '{"other": 1}'):
        (tmp_path / "chat.json").write_text(damaged)
        with pytest.raises(DataError, match="damaged"):
            ChatStyle.found(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with special tokens and a template, as Hugging Face models have them."""
    END.save(tmp_path / "tokenizer.json")
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
