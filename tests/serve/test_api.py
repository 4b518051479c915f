"""OpenAI's own client talks to a server of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from serve.conftest import Server

from drumline.generate import SampleConfig, WritingRun, sample_run, writing_run
from drumline.generate.loading import load_run
from drumline.generate.streaming import sample_text
from drumline.model.gpt import GPT


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def loaded(a_run: Path) -> WritingRun:
    return writing_run(a_run, device="cpu")


def sampled(loaded: WritingRun, prompt: str, **settings: float) -> str:
    """What `drumline sample` writes after the prompt."""
    config = SampleConfig(**{"temperature": 0.0, **settings})  # type: ignore[arg-type]
    return "".join(sample_text(loaded.model, loaded.tokenizer, prompt, config, context=None))


def test_a_completion_is_the_text_of_sample_far_past_the_context(client: OpenAI, a_run: Path) -> None:
    answer = client.completions.create(model="small", prompt="Document 7, line", temperature=0, max_tokens=150)
    config = SampleConfig(temperature=0.0, max_tokens=150)
    assert "Document 7, line" + answer.choices[0].text == "".join(
        sample_run(a_run, "Document 7, line", config, device="cpu")
    )
    assert answer.object == "text_completion" and answer.model == "small"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 150
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 150


def test_a_seed_gives_the_text_of_sample_and_each_of_n_choices_its_own(client: OpenAI, loaded: WritingRun) -> None:
    wanted = [sampled(loaded, "Doc", temperature=1.2, seed=seed, max_tokens=12) for seed in (5, 6, 7)]
    answer = client.completions.create(model="small", prompt="Doc", temperature=1.2, seed=5, n=3, max_tokens=12)
    assert [choice.text for choice in answer.choices] == wanted and len(set(wanted)) == 3
    one = client.completions.create(model="small", prompt="Doc", temperature=1.2, max_tokens=12)
    other = client.completions.create(model="small", prompt="Doc", temperature=1.2, max_tokens=12)
    assert one.choices[0].text != other.choices[0].text


def test_several_prompts_as_texts_or_ids_are_answered_in_their_order(client: OpenAI, loaded: WritingRun) -> None:
    texts = ["Document 3", "line 4", "rolls"]
    wanted = [sampled(loaded, text, max_tokens=8) for text in texts]
    for prompt in (texts, [loaded.tokenizer.encode(text) for text in texts]):
        answer = client.completions.create(model="small", prompt=prompt, temperature=0, max_tokens=8)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == [0, 1, 2]


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_has_the_same_text_logprobs_and_usage_as_the_whole_answer(client: OpenAI, is_chat: bool) -> None:
    if is_chat:
        ask = {"messages": [{"role": "user", "content": "Document 9"}], "logprobs": True, "top_logprobs": 2}
        create = client.chat.completions.create
    else:
        ask, create = {"prompt": "Document 9, line", "logprobs": 2, "echo": True}, client.completions.create  # type: ignore[assignment]
    ask |= {"model": "small", "temperature": 0.7, "seed": 3, "n": 2, "max_tokens": 25, "stop": ["7", "lls"]}
    whole = create(**ask)  # type: ignore[call-overload]
    chunks = list(create(**ask, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    for choice in whole.choices:
        own = [each.choices[0] for each in chunks[:-1] if each.choices[0].index == choice.index]
        if is_chat:
            assert "".join(each.delta.content or "" for each in own) == choice.message.content
            assert own[0].delta.role == "assistant"
            assert [x for each in own if each.logprobs for x in each.logprobs.content] == choice.logprobs.content
        else:
            assert "".join(each.text for each in own) == choice.text
            offsets = [x for each in own if each.logprobs for x in each.logprobs.text_offset]
            assert offsets == choice.logprobs.text_offset
        assert own[-1].finish_reason == choice.finish_reason


def test_log_probabilities_come_with_alternatives_offsets_and_the_echoed_prompt(client: OpenAI) -> None:
    ask = {"model": "small", "prompt": "Document 3, line", "temperature": 0, "echo": True, "logprobs": 3}
    choice = client.completions.create(**ask, max_tokens=6).choices[0]  # type: ignore[call-overload]
    scores = choice.logprobs
    assert choice.text.startswith("Document 3, line") and scores.token_logprobs[0] is None
    pieces = [choice.text[a:b] for a, b in zip(scores.text_offset, [*scores.text_offset[1:], None], strict=True)]
    assert pieces == scores.tokens  # no character here has several tokens
    for token, logprob, top in list(zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True))[1:]:
        assert logprob <= max(top.values()) <= 0 and len(top) == 3
        assert token not in top or top[token] == logprob
    scored = client.completions.create(**ask, max_tokens=0)  # type: ignore[call-overload]
    assert scored.choices[0].text == "Document 3, line" and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        scores.token_logprobs[1 : len(scored.choices[0].logprobs.tokens)], abs=1e-5
    )


def test_only_ids_of_the_tokenizer_have_a_probability(client: OpenAI, a_run: Path) -> None:
    """As in an exported model: the rows that round up the vocabulary are for training."""
    run = load_run(a_run)
    assert run.tokenizer is not None and isinstance(run.model, GPT)
    known, ids = run.tokenizer.vocab_size, run.tokenizer.encode("Document 3, line")
    assert known < run.model.token_embedding.num_embeddings
    with torch.no_grad():
        logits = run.model.eval()(torch.tensor([ids]))[0][0, :-1, :known]  # (T - 1, V)
    wanted = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    scored = client.completions.create(model="small", prompt=ids, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.logprobs is not None and scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-4)


def test_text_ends_before_a_stop_string_and_says_why(client: OpenAI, loaded: WritingRun) -> None:
    free = sampled(loaded, "Document 3, line", max_tokens=40)
    answer = client.completions.create(
        model="small", prompt="Document 3, line", temperature=0, max_tokens=40, stop=["never", ". Doc"], logprobs=0
    ).choices[0]
    assert answer.text == free.partition(". Doc")[0] and answer.finish_reason == "stop"
    assert answer.logprobs is not None and answer.logprobs.text_offset is not None
    assert max(answer.logprobs.text_offset) < len(answer.text)


def test_a_chat_is_continued_as_plain_text_up_to_the_next_turn(client: OpenAI, loaded: WritingRun) -> None:
    answer = client.chat.completions.create(
        model="small",
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Document 1"}],
        temperature=0,
        max_tokens=10,
    )
    assert answer.choices[0].message.role == "assistant"
    prompt = "System: Be short.\nUser: Document 1\nAssistant:"
    assert len(loaded.tokenizer.encode(prompt)) <= 48
    assert answer.choices[0].message.content == sampled(loaded, prompt, max_tokens=10).partition("\nUser:")[0]
    long = [{"role": role, "content": "Document 2"} for role in ("user", "assistant") * 20]
    more = client.chat.completions.create(model="small", messages=[*long, long[0]], max_tokens=2)  # type: ignore[arg-type]
    assert more.usage is not None and more.usage.prompt_tokens <= 48


def test_200_requests_at_once_each_get_the_text_of_sample(server: Server, loaded: WritingRun) -> None:
    prompts = [f"Document {number % 40}, line {number // 40}"[: 6 + number % 14] for number in range(200)]
    lengths = [4 + number % 13 for number in range(200)]

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:

            async def ask(prompt: str, length: int) -> str:
                if length % 2:
                    stream = await client.completions.create(
                        model="small", prompt=prompt, temperature=0, max_tokens=length, stream=True
                    )
                    return "".join([chunk.choices[0].text async for chunk in stream])
                whole = await client.completions.create(model="small", prompt=prompt, temperature=0, max_tokens=length)
                return whole.choices[0].text

            return await asyncio.gather(*(ask(*each) for each in zip(prompts, lengths, strict=True)))

    got = asyncio.run(ask_all())
    wanted = {each: sampled(loaded, each[0], max_tokens=each[1]) for each in set(zip(prompts, lengths, strict=True))}
    assert got == [wanted[each] for each in zip(prompts, lengths, strict=True)]
    assert server.health() == {"status": "ok", "active": 0, "total": 6, "waiting": 0}


def test_models_are_listed_and_another_one_is_not_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    for call in (
        lambda: client.models.retrieve("large"),
        lambda: client.completions.create(model="../large", prompt=""),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            call()
        assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": 99}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[1], [10**6]]}, "prompt"),
        ({"prompt": "word " * 99}, "prompt"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"best_of": 3}, "best_of"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_name(client: OpenAI, wrong: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="small", prompt="a", extra_body=wrong)  # type: ignore[call-overload]
    assert refused.value.param == param and refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("messages", [[], ["a"], [{"role": "cat", "content": ""}], [{"role": "user", "content": 1}]])
def test_messages_that_are_none_are_refused(client: OpenAI, messages: list[object]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="small", messages=messages)  # type: ignore[call-overload]
    assert refused.value.param == "messages"


def test_errors_of_http_have_the_same_form(server: Server) -> None:
    json = {"Content-Type": "application/json"}
    for status, answer in (
        (404, httpx.get(f"{server.url}/v1/<script>alert(1)</script>")),
        (405, httpx.get(f"{server.url}/v1/completions")),
        (400, httpx.post(f"{server.url}/v1/completions", content=b"{", headers=json)),
        (400, httpx.post(f"{server.url}/v1/completions", content=b"[]", headers=json)),
        (400, httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "\\ud800"}', headers=json)),
        (415, httpx.post(f"{server.url}/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})),
        (403, httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.example"})),
        (413, httpx.post(f"{server.url}/v1/completions", content=b" " * (1 << 21), headers=json)),
        (413, httpx.post(f"{server.url}/v1/completions", content=iter([b" " * (1 << 19)] * 4), headers=json)),
    ):
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert {*answer.json()["error"]} == {"message", "type", "param", "code"}


def test_the_page_loads_nothing_from_elsewhere_and_never_takes_text_for_html(server: Server) -> None:
    answer = httpx.get(server.url)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    for danger in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http:", "https:", "onclick"):
        assert danger not in answer.text
    assert "温度" in answer.text and "Temperature" in answer.text
