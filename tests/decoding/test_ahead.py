"""An engine that runs ahead of its readers: every text is what the model writes alone, and what comes after its end is
dropped. On a CPU the same steps are launched one by one, not captured.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.config.model import GPTConfig
from drumline.decoding import engine as engine_module
from drumline.decoding.engine import AheadEngine
from drumline.generate.engine import Reason, Request, Scored, make_engine
from drumline.generate.sample import SampleConfig, generate, next_logits
from drumline.generate.storing import store_as
from drumline.model.gpt import GPT

CLASSIC = GPTConfig(
    vocab_size=61, max_position_embeddings=16, n_layers=2, n_heads=4, d_model=32, d_ff=64, tie_embeddings=False
)
MODERN = replace(CLASSIC, positions="rope", norm="rmsnorm", activation="relu2", qk_norm=True, bias=False)
CONFIGS = {
    "gpt2": replace(CLASSIC, tie_embeddings=True),
    "llama": replace(MODERN, n_kv_heads=2, activation="swiglu", qk_norm=False, rope_theta=5e5, norm_eps=1e-5),
    "modern": replace(MODERN, smear=True, value_tables=2, softcap=15.0, norm_weights=False),
    "portable": replace(MODERN, activation="swiglu", norm_weights=False, n_layers=3),
}
END = 7
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


def lively(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.dim() > 1):
            matrix.copy_(torch.randn_like(matrix) * 0.3)
    return model.eval()


MODELS = {name: lively(config) for name, config in CONFIGS.items()}


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


def engine_of(name: str, slots: int, *, end: int | None = END, device: str = "cpu", **more: int) -> AheadEngine:
    model = MODELS[name].to(device)
    return AheadEngine(model, slots=slots, context=16, ends=[] if end is None else [end], **more)


def request(prompt: list[int], **settings: float) -> Request:
    sampling = SampleConfig(**{"temperature": 0.0, "max_tokens": 40, **settings})  # type: ignore[arg-type]
    return Request(prompt=prompt, settings=sampling, max_tokens=sampling.max_tokens, reader=Collected())


def collected(request: Request) -> Collected:
    assert isinstance(request.reader, Collected)
    return request.reader


def finish(engine: AheadEngine) -> None:
    while engine.active or engine.waiting:
        engine.step()


def alone(name: str, each: Request) -> list[int]:
    """Greedy text by `generate`; sampled text by an engine that has nothing else to do."""
    if each.settings.temperature == 0.0:
        return list(generate(MODELS[name], [*each.prompt], each.settings, end_of_text=END, context=16))
    engine = engine_of(name, 1)
    again = replace(each, reader=Collected())
    engine.submit(again)
    finish(engine)
    return collected(again).ids


REQUESTS = st.builds(
    request,
    st.lists(st.integers(8, 60), max_size=24),
    temperature=st.sampled_from([0.0, 0.0, 0.9, 1.5]),
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 30),
    top_k=st.sampled_from([None, None, 1, 5]),
    top_p=st.sampled_from([None, 0.8]),
)


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=15)
def test_texts_that_join_and_leave_a_launched_batch_get_what_they_get_alone(name: str, data: st.DataObject) -> None:
    engine = engine_of(name, data.draw(st.integers(1, 5)))
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_the_same_as_before_through_several_windows(name: str, device: str) -> None:
    engine = engine_of(name, 3, device=device)
    requests = [request([8 + (5 * i + n) % 50 for i in range(n)], max_tokens=60) for n in (1, 16, 11, 14, 30)]
    for each in requests:
        engine.submit(each)
        engine.step()
    finish(engine)
    MODELS[name].to("cpu")
    assert [collected(each).ids for each in requests] == [alone(name, each) for each in requests]


@NEEDS_CUDA
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_kernels_and_torch_sample_nearly_the_same_in_half_precision(name: str) -> None:
    model = lively(replace(CONFIGS[name], d_model=128, n_heads=4, max_position_embeddings=512)).to("cuda")
    store_as(model, torch.bfloat16)
    texts = []
    for fused in (True, False):
        engine = AheadEngine(model, slots=4, context=512, ends=[], fused=fused)
        requests = [request([8 + n], temperature=0.8 * (n > 1), seed=n, max_tokens=100) for n in range(4)]
        for each in requests:
            engine.submit(each)
        finish(engine)
        texts.append([collected(each).ids for each in requests])
    assert all(len(text) == 100 for text in texts[0])
    # A rounding decides where two tokens are as likely: seldom among the first ones, and then in one of the texts.
    assert sum(one[:3] == other[:3] for one, other in zip(*texts, strict=True)) >= 3


@NEEDS_CUDA
def test_the_engine_of_a_gpt_on_a_gpu_is_the_one_that_runs_ahead() -> None:
    model = MODELS["modern"].to("cuda")
    assert isinstance(make_engine(model, slots=2, context=16, ends=[]), AheadEngine)
    model.to("cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_come_with_tokens_that_are_launched_ahead(device: str) -> None:
    engine, each = engine_of("modern", 2, device=device), request([9, 10, 11, 12], max_tokens=5)
    each.top, each.scores_prompt = 2, True
    engine.submit(request([20, 21], temperature=1.0))
    engine.submit(each)
    finish(engine)
    MODELS["modern"].to("cpu")
    got = [*collected(each).prompt, *collected(each).tokens]
    ids = [scored.token for scored in got]
    assert ids[:4] == [9, 10, 11, 12] and got[0].logprob is None and len(ids) == 9
    for place in range(1, len(ids)):
        logprobs = next_logits(MODELS["modern"], ids[:place], None).log_softmax(dim=0)
        assert got[place].logprob == pytest.approx(float(logprobs[ids[place]]), abs=1e-4)
        assert [token for token, _ in got[place].top] == logprobs.topk(2).indices.tolist()


def test_the_token_that_ends_a_text_has_a_log_probability_if_asked_for() -> None:
    first = next(generate(MODELS["modern"], [9, 12], SampleConfig(temperature=0.0), end_of_text=None))
    engine, plain, scored = engine_of("modern", 2, end=first), request([9, 12]), request([9, 12])
    scored.top = 0
    for each in (plain, scored):
        engine.submit(each)
    finish(engine)
    assert collected(plain).ids == collected(scored).ids == [] and collected(plain).end is None
    end = collected(scored).end
    assert end is not None and end.token == first and end.logprob is not None


def test_no_tokens_are_made_by_a_launch_where_only_the_prompt_is_scored() -> None:
    engine, each = engine_of("gpt2", 1), request([9, 10])
    each.max_tokens, each.scores_prompt = 0, True
    engine.submit(each)
    finish(engine)
    assert [scored.token for scored in collected(each).prompt] == [9, 10] and collected(each).ids == []
    assert collected(each).reason == "length"


def test_a_request_that_is_cancelled_or_has_enough_gets_nothing_of_what_was_launched_for_it() -> None:
    engine = engine_of("modern", 1, end=None)
    first, second, third = (request([n]) for n in (9, 10, 11))
    second.reader = Collected(enough=2)
    for each in (first, second, third):
        engine.submit(each)
    for _ in range(engine_module.STEPS_AHEAD + 1):
        engine.step()
    first.cancelled = third.cancelled = True
    finish(engine)
    assert collected(first).reason == "cancelled" and 1 <= len(collected(first).ids) <= 2
    assert collected(second).reason == "stop" and len(collected(second).ids) == 2
    assert collected(third).reason == "cancelled" and collected(third).ids == []


def test_only_tokens_of_the_vocabulary_are_sampled() -> None:
    engine = engine_of("llama", 2, end=None, vocabulary=12)
    requests = [request([9], temperature=2.0, seed=seed, max_tokens=60) for seed in (1, 2)]
    for each in requests:
        engine.submit(each)
    finish(engine)
    assert {token for each in requests for token in collected(each).ids} == set(range(12))


def test_prompts_are_read_several_at_once_and_no_more_than_fit_into_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 12)
    engine = engine_of("portable", 5)
    passes = []
    begin = engine.slots.begin

    def watched(slots: list[int], prompts: list[list[int]], *others: object) -> object:
        passes.append([len(prompt) for prompt in prompts])
        return begin(slots, prompts, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.slots, "begin", watched)
    requests = [request([9] * length, max_tokens=1) for length in (4, 3, 4, 16, 2)]
    for each in requests:
        engine.submit(each)
    finish(engine)
    assert passes == [[4, 3, 4], [2], [16]]  # where texts have ended, the last one takes their place
    assert [collected(each).ids for each in requests] == [alone("portable", each) for each in requests]


def test_a_launch_that_fails_leaves_nothing_behind() -> None:
    class Fragile(Collected):
        def token(self, token: Scored) -> bool:
            raise RuntimeError("a bug")

    engine, bad, good = engine_of("gpt2", 2), request([9]), request([10])
    bad.reader = Fragile()
    engine.submit(bad)
    with pytest.raises(RuntimeError, match="a bug"):
        finish(engine)
    engine._active.clear()  # as `run` does
    engine.submit(good)
    finish(engine)
    assert collected(good).ids == alone("gpt2", good)
