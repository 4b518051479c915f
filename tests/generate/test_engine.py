"""Texts that share a batch: each is what it is alone, whatever joins and leaves beside it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drumline.config.model import GPTConfig
from drumline.generate import engine as engine_module
from drumline.generate.engine import Engine, Reason, Request, Scored, make_engine
from drumline.generate.sample import SampleConfig, generate, next_logits
from drumline.model.gpt import GPT

CLASSIC = GPTConfig(
    vocab_size=61, max_position_embeddings=16, n_layers=2, n_heads=4, d_model=32, d_ff=64, tie_embeddings=False
)
MODERN = replace(CLASSIC, n_kv_heads=2, positions="rope", norm="rmsnorm", activation="relu2", qk_norm=True, bias=False)
CONFIGS = {
    "classic": CLASSIC,
    "modern": MODERN,
    "recipe": replace(MODERN, smear=True, value_tables=1, softcap=15.0, norm_weights=False),
}
END = 7


class Bigram(nn.Module):
    """A model that is no GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 61)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, None]:
        return self.table(input_ids), None


def lively(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = Bigram() if name == "bigram" else GPT(CONFIGS[name])
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.dim() > 1):
            matrix.copy_(torch.randn_like(matrix) * 0.3)
    return model.eval()


MODELS = {name: lively(name) for name in (*CONFIGS, "bigram")}


class Collected:
    """A reader that keeps all it gets, and has enough after `enough` tokens."""

    def __init__(self, enough: int = 10**9) -> None:
        self.tokens: list[Scored] = []
        self.prompt: list[Scored] = []
        self.reason: Reason | None = None
        self.end: Scored | None = None
        self.enough = enough

    def prompt_scored(self, tokens: list[Scored]) -> None:
        self.prompt = tokens

    def token(self, token: Scored) -> bool:
        assert self.reason is None
        self.tokens.append(token)
        return len(self.tokens) < self.enough

    def ended(self, reason: Reason, token: Scored | None) -> None:
        assert self.reason is None
        self.reason, self.end = reason, token

    @property
    def ids(self) -> list[int]:
        return [scored.token for scored in self.tokens]


def engine_of(name: str, slots: int, end: int | None = END) -> Engine:
    return make_engine(MODELS[name], slots=slots, context=16, ends=[] if end is None else [end])


def alone(name: str, request: Request, end: int | None = END) -> list[int]:
    return list(generate(MODELS[name], [*request.prompt], request.settings, end_of_text=end, context=16))


def request(prompt: list[int], **settings: float) -> Request:
    sampling = SampleConfig(**{"temperature": 0.0, "max_tokens": 40, **settings})  # type: ignore[arg-type]
    return Request(prompt=prompt, settings=sampling, max_tokens=sampling.max_tokens, reader=Collected())


def collected(request: Request) -> Collected:
    assert isinstance(request.reader, Collected)
    return request.reader


def finish(engine: Engine) -> None:
    while engine.active or engine.waiting:
        engine.step()


REQUESTS = st.builds(
    request,
    st.lists(st.integers(8, 60), max_size=24),
    temperature=st.sampled_from([0.0, 0.0, 0.9, 1.5]),
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 30),
    top_p=st.sampled_from([None, 0.8]),
)


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=15)
def test_requests_that_join_and_leave_at_any_time_get_what_they_get_alone(name: str, data: st.DataObject) -> None:
    engine = engine_of(name, data.draw(st.integers(1, 4)))
    everything = data.draw(st.lists(st.tuples(REQUESTS, st.integers(0, 12)), min_size=1, max_size=7))
    for each, steps_before in everything:
        for _ in range(steps_before):
            engine.step()
        engine.submit(each)
    finish(engine)
    for each, _ in everything:
        wanted = alone(name, each)
        assert collected(each).ids == wanted
        assert collected(each).reason == ("length" if len(wanted) == each.max_tokens else "stop")


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_read_in_pieces_beside_other_texts_gives_the_same_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 3)
    engine = engine_of(name, 3, end=None)
    requests = [request([8 + (5 * i + n) % 50 for i in range(n)]) for n in (1, 16, 11, 14)]
    for each in requests:
        engine.submit(each)
        engine.step()
    finish(engine)
    assert [collected(each).ids for each in requests] == [alone(name, each, end=None) for each in requests]
    assert all(len(collected(each).ids) == 40 for each in requests)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_one_length_that_come_together_are_read_in_one_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, read = engine_of(name, 8), list[int]()
    whole = engine.slots.begin_together

    def noted(slot: int, texts: Sequence[Sequence[int]]) -> Tensor:
        read.append(len(texts))
        return whole(slot, texts)

    monkeypatch.setattr(engine.slots, "begin_together", noted)
    together = [request([9 + number, 20, 30 + number], max_tokens=6) for number in range(4)]
    only_read = Request(prompt=[10, 11, 12], settings=SampleConfig(), max_tokens=0, reader=Collected())
    others = [request([8, 9], max_tokens=6), only_read]
    for each in [*together, *others]:
        engine.submit(each)
    finish(engine)
    assert read == [4]
    assert [collected(each).ids for each in together] == [alone(name, each) for each in together]


def test_log_probabilities_are_those_of_the_model_for_the_prompt_and_the_text() -> None:
    engine, each = engine_of("recipe", 2), request([9, 10, 11, 12], max_tokens=5)
    each.top, each.scores_prompt = 2, True
    engine.submit(each)
    engine.submit(request([20, 21], temperature=1.0))
    finish(engine)
    got = [*collected(each).prompt, *collected(each).tokens]
    ids = [scored.token for scored in got]
    assert ids[:4] == [9, 10, 11, 12] and got[0].logprob is None
    for place in range(1, len(ids)):
        logprobs = next_logits(MODELS["recipe"], ids[:place], None).log_softmax(dim=0)
        assert got[place].logprob == pytest.approx(float(logprobs[ids[place]]), abs=1e-4)
        assert [token for token, _ in got[place].top] == logprobs.topk(2).indices.tolist()


def test_no_tokens_are_made_where_only_the_prompt_is_to_be_scored() -> None:
    engine, each = engine_of("classic", 1), request([9])
    each.max_tokens, each.scores_prompt = 0, True
    engine.submit(each)
    finish(engine)
    assert collected(each).prompt == [Scored(9)] and collected(each).ids == []
    assert collected(each).reason == "length"


def test_the_token_that_ends_a_text_has_a_log_probability_if_they_are_asked_for() -> None:
    first = alone("modern", request([9, 12], max_tokens=1), end=None)[0]
    engine, plain, scored = engine_of("modern", 2, end=first), request([9, 12]), request([9, 12])
    scored.top = 0
    for each in (plain, scored):
        engine.submit(each)
    finish(engine)
    assert collected(plain).ids == collected(scored).ids == [] and collected(plain).end is None
    with torch.no_grad():
        logprobs = MODELS["modern"](torch.tensor([[9, 12]]))[0][0, -1].log_softmax(dim=0)
    assert collected(scored).end == Scored(first, pytest.approx(float(logprobs[first]), abs=1e-5), ())
    assert collected(scored).reason == "stop"


def test_a_request_that_is_cancelled_or_has_enough_frees_its_slot_at_once() -> None:
    engine = engine_of("modern", 1)
    first, second, third = (request([n]) for n in (9, 10, 11))
    for each in (first, second, third):
        engine.submit(each)
    engine.step()
    first.cancelled = third.cancelled = True
    second.reader = Collected(enough=2)
    engine.step()
    assert collected(first).reason == "cancelled" and len(collected(first).ids) == 1 and engine.active == 1
    finish(engine)
    assert collected(second).reason == "stop" and len(collected(second).ids) == 2
    assert collected(third).reason == "cancelled" and collected(third).ids == []


def test_a_batch_that_fails_ends_its_requests_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Fragile(Collected):
        def token(self, token: Scored) -> bool:
            raise RuntimeError("a bug")

    class Closing(Collected):
        def ended(self, reason: Reason, token: Scored | None) -> None:
            super().ended(reason, token)
            engine.close()

    engine, bad, good = engine_of("classic", 1), request([9]), request([10])
    bad.reader, good.reader = Fragile(), Closing()
    engine.submit(bad)
    engine.submit(good)
    thread = threading.Thread(target=engine.run)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive() and "a bug" in caplog.text
    assert collected(bad).reason == "error" and collected(good).ids == alone("classic", good)
