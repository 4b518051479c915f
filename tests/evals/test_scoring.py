"""Scores of continuations: those of the model alone, whatever else is in the batch."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from drumline.config.model import GPTConfig
from drumline.data.tokenizer import Tokenizer
from drumline.evals.generating import continuations
from drumline.evals.scoring import Pair, Scorer
from drumline.generate.sample import SampleConfig, generate
from drumline.model.gpt import GPT

CLASSIC = GPTConfig(vocab_size=300, max_position_embeddings=16, n_layers=2, n_heads=4, d_model=32, d_ff=64)
MODERN = replace(
    CLASSIC, n_kv_heads=2, positions="rope", norm="rmsnorm", activation="relu2", qk_norm=True, bias=False, smear=True
)
TOKENIZER = Tokenizer.train(["the cat sat on the mat and the dog sat on the cat"] * 3, vocab_size=300)


class Plugin(nn.Module):
    """A model of another kind: logits without a cache."""

    def __init__(self, inner: GPT) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, input_ids: torch.Tensor, *, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.inner(input_ids, targets=targets)  # type: ignore[no-any-return]


def scorer(config: GPTConfig, *, batch_size: int = 4, plugin: bool = False) -> Scorer:
    torch.manual_seed(0)
    model = GPT(replace(config, dropout=0.3))
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.dim() > 1):
            matrix.copy_(torch.randn_like(matrix) * 0.3)
    return Scorer(model=Plugin(model) if plugin else model, tokenizer=TOKENIZER, context=16, batch_size=batch_size)


def pairs() -> list[Pair]:
    draw = random.Random(0)
    lengths = [(1, 1), (3, 5), (9, 2), (12, 4), (12, 5), (20, 3), (2, 16)]
    return [tuple([draw.randrange(257) for _ in range(n)] for n in both) for both in lengths]  # type: ignore[misc]


@pytest.mark.parametrize("config", [CLASSIC, MODERN], ids=["classic", "modern"])
@pytest.mark.parametrize("plugin", [False, True])
def test_scores_are_those_of_one_sequence_alone_whatever_the_batch(config: GPTConfig, plugin: bool) -> None:
    ours = scorer(config, plugin=plugin)
    model = ours.model.train()
    batched = ours.scores(pairs())
    assert model.training
    model.eval()
    for (before, after), score in zip(pairs(), batched, strict=True):
        ids = torch.tensor([(before + after)[-17:]])
        logits = model(ids[:, :-1])[0][0, :, : TOKENIZER.vocab_size].log_softmax(-1)  # (T, V)
        wanted = ids[0, 1:]
        count = min(len(after), len(wanted))
        assert score.tokens == count
        assert score.nats == pytest.approx(logits[-count:].gather(1, wanted[-count:, None]).sum().item(), abs=1e-4)
        assert score.is_greedy == bool((logits[-count:].argmax(-1) == wanted[-count:]).all())


def test_what_the_model_writes_greedily_is_scored_as_such() -> None:
    ours = scorer(CLASSIC)
    prompt = [5, 6, 7]
    written = list(generate(ours.model, prompt, SampleConfig(temperature=0.0, max_tokens=6), end_of_text=None))
    other = [*written[:-1], (written[-1] + 1) % 257]
    assert [score.is_greedy for score in ours.scores([(prompt, written), (prompt, other)])] == [True, False]


def test_a_passage_and_its_continuation_are_divided_as_the_whole_text_is() -> None:
    ours = scorer(CLASSIC)
    whole = TOKENIZER.encode("the cat sat on the mat")
    for passage, rest in (("the cat sat", " on the mat"), ("the cat sat ", "on the mat")):
        before, after = ours.encoded(passage, rest)
        assert before + after == whole and TOKENIZER.decode(after) == " on the mat"
    assert ours.encoded("", "the cat") == ([TOKENIZER.end_of_text], TOKENIZER.encode("the cat"))
    assert ours.encoded(" ", "cat") == ([TOKENIZER.end_of_text], TOKENIZER.encode(" cat"))


@pytest.mark.parametrize("plugin", [False, True])
def test_texts_written_together_are_those_written_alone_and_end_before_a_stop_string(plugin: bool) -> None:
    ours, greedy = scorer(MODERN, plugin=plugin), SampleConfig(temperature=0.0, max_tokens=6)
    prompts = ["the cat", "the dog", "the mat sat on", "on", "", "the cat sat on the mat and the dog sat on the mat"]
    together = continuations(ours, prompts, until=[], settings=greedy)
    assert together == [continuations(ours, [prompt], until=[], settings=greedy)[0] for prompt in prompts]
    ids = generate(ours.model, TOKENIZER.encode(prompts[0]), greedy, end_of_text=TOKENIZER.end_of_text, context=16)
    assert together[0] == TOKENIZER.decode(list(ids))
    stop = together[0][2:4]
    (cut,) = continuations(ours, prompts[:1], until=[stop], settings=greedy)
    assert stop and cut == together[0][: together[0].index(stop)]
