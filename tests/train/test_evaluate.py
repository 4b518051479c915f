"""Held-out loss: over every token exactly once, whatever the batch size."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from drumline.config.model import GPTConfig
from drumline.data.tokens import TokenFile
from drumline.errors import DataError
from drumline.model.build import token_objective
from drumline.model.gpt import GPT
from drumline.parallel.world import Place, World
from drumline.train.evaluation import evaluate
from drumline.train.step import Precision

CPU = Precision.of(torch.device("cpu"), torch.float32)
ALONE = World(Place(), CPU.device)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(vocab_size=32, max_position_embeddings=8, n_layers=1, n_heads=2, d_model=8, d_ff=16, dropout=0.5)
    )


def tokens(count: int, text_bytes: int | None = None) -> TokenFile:
    ids = np.random.default_rng(0).integers(32, size=count).astype(np.uint16)
    return TokenFile(path=Path("valid.bin"), tokens=ids, text_bytes=text_bytes)


@pytest.mark.parametrize("count", [2, 8, 9, 10, 41, 43])
def test_every_token_after_the_first_is_predicted_once_whatever_the_batch_size(count: int) -> None:
    gpt, file = model(), tokens(count)
    evaluations = [
        evaluate(gpt, token_objective, file, context=8, batch_size=size, precision=CPU, world=ALONE)
        for size in (1, 3, 100)
    ]
    assert {each.tokens for each in evaluations} == {count - 1}
    gpt.eval()
    nats = 0.0
    for start in range(0, count - 1, 8):
        piece = torch.from_numpy(file.read(start, min(count, start + 9)))
        nats += F.cross_entropy(gpt(piece[None, :-1])[0][0], piece[1:], reduction="sum").item()
    assert [each.loss for each in evaluations] == pytest.approx([nats / (count - 1)] * 3, rel=1e-6)


def test_bits_per_byte_and_perplexity_follow_from_the_loss() -> None:
    evaluation = evaluate(
        model(), token_objective, tokens(41, text_bytes=100), context=8, batch_size=4, precision=CPU, world=ALONE
    )
    assert evaluation.bits_per_byte == pytest.approx(evaluation.loss / math.log(2) * 41 / 100)
    assert evaluation.perplexity == pytest.approx(math.exp(evaluation.loss))


def test_some_windows_are_spread_over_the_whole_file() -> None:
    seen: list[int] = []

    def objective(gpt: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor, None]) -> torch.Tensor:
        seen.extend(batch[0][:, 0].tolist())
        return torch.tensor(1.0)

    file = TokenFile(path=Path("v"), tokens=np.arange(801, dtype=np.uint16))
    evaluate(model(), objective, file, context=8, batch_size=2, precision=CPU, world=ALONE, windows=4)
    assert seen == [0, 200, 400, 600]


def test_evaluating_leaves_the_model_in_training_as_it_was() -> None:
    gpt = model().train()
    evaluate(gpt, token_objective, tokens(20), context=8, batch_size=4, precision=CPU, world=ALONE)
    assert gpt.training and all(p.grad is None for p in gpt.parameters())


def test_a_file_with_nothing_to_predict_is_refused() -> None:
    with pytest.raises(DataError, match="1 tokens, too few"):
        evaluate(model(), token_objective, tokens(1), context=8, batch_size=4, precision=CPU, world=ALONE)
