"""Conversations in windows: whole where they fit, each token counted once, and none sees its neighbours."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.chats import opened, talk, uneven, write_chats
from helpers.steps import make_step, train_step
from torch.nn import functional as F

from drumline.chats.batches import ChatBatches
from drumline.chats.packing import ChatTokens, packed_batch
from drumline.chats.templates import ENDS
from drumline.config.model import GPTConfig
from drumline.data.batches import BatchPlan
from drumline.errors import DataError
from drumline.model.build import token_objective
from drumline.model.gpt import GPT

MODERN = {"positions": "rope", "qk_norm": True, "smear": True, "value_tables": 1}


@pytest.fixture
def tokens(tmp_path: Path) -> ChatTokens:
    return opened(write_chats(tmp_path / "x.jsonl", uneven(30)), tmp_path / "tokens")


def conversations(tokens: ChatTokens) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and targets of each conversation: int64 (n,) each, the target of each token, or -100."""
    found, start = [], 0
    assert tokens.document_ends is not None
    for stop in tokens.document_ends.tolist():
        ids, kinds = tokens.read(start, stop), tokens.read_targets(start, stop)
        wanted = np.where(kinds == ENDS, tokens.end_of_text, np.where(kinds == 0, -100, ids))
        found.append((torch.from_numpy(ids), torch.from_numpy(wanted)))
        start = stop
    return found


def gpt(vocab_size: int, context: int = 64, **options: object) -> GPT:
    torch.manual_seed(0)
    shape = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 32, "max_position_embeddings": context}
    model = GPT(GPTConfig(vocab_size=vocab_size, **shape, **options))  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("context", [7, 20, 64, 4000])
def test_every_token_of_an_answer_counts_once_in_the_windows_of_any_context(tokens: ChatTokens, context: int) -> None:
    inputs, targets, documents = packed_batch(tokens, range(tokens.windows(context)), context=context)
    assert inputs.shape == targets.shape == documents.shape == (tokens.windows(context), context)
    wanted = torch.cat([each[1:] for _, each in conversations(tokens)])
    counted = targets[targets != -100]
    assert counted.tolist() == wanted[wanted != -100].tolist()
    assert tokens.counted(range(tokens.windows(context)), context=context) == len(counted)
    assert ((targets != -100).sum(1) > 0).all()
    if context >= 64:  # whole: each window begins with a question or a system message
        starts = {conversation[0].item() for conversation, _ in conversations(tokens)}
        assert set(inputs[:, 0].tolist()) <= starts


def test_a_token_of_a_long_conversation_is_predicted_from_at_least_half_a_context(tmp_path: Path) -> None:
    long = talk("a", "b " * 300, "c", "d " * 40)
    tokens = opened(write_chats(tmp_path / "x.jsonl", [long]), tmp_path / "tokens")
    _, targets, documents = packed_batch(tokens, range(tokens.windows(16)), context=16)
    first = (targets != -100).int().argmax(1)
    assert (first[1:] >= 7).all() and (documents == 0).all()


@pytest.mark.parametrize("options", [{}, MODERN], ids=["classic", "modern"])
def test_a_conversation_does_not_see_its_neighbours_in_the_window(
    tokens: ChatTokens, options: dict[str, object]
) -> None:
    model = gpt(tokens.vocab_size or 0, **options)
    inputs, _, documents = packed_batch(tokens, [1], context=64)
    second = documents[0] == 1
    with torch.no_grad():
        (before,) = model(inputs, document_ids=documents)[0]
        changed = inputs.clone()
        changed[0, ~second] = changed[0, ~second].flip(0)
        (after,) = model(changed, document_ids=documents)[0]
        (alone,) = model(inputs[:, second])[0]
    assert second.any() and not torch.equal(before[~second], after[~second])
    assert torch.equal(before[second], after[second])
    torch.testing.assert_close(alone, before[second], rtol=1e-4, atol=1e-4)  # positions begin anew as well


@pytest.mark.parametrize("plan", [BatchPlan(2, 2), BatchPlan(4, 1)], ids=["2 x 2", "4 x 1"])
def test_the_loss_of_a_step_is_the_mean_over_its_assistant_tokens(tokens: ChatTokens, plan: BatchPlan) -> None:
    context = 64
    batches = ChatBatches(tokens, plan, context=context, seed=0)
    model = gpt(tokens.vocab_size or 0, **MODERN)
    step = make_step(
        model, torch.optim.SGD(model.parameters(), lr=0.0), token_objective, weight=plan.sequences * context
    )
    result = train_step(step, (batches.micro_batch(0, index) for index in range(plan.micro_batches)), lr=0.0)
    seen = set(batches.names(0))
    every = conversations(tokens)
    chosen = [every[int(name.rsplit(":", 1)[1]) - 1] for name in seen]
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(ids[None])[0][0, :-1], wanted[1:], ignore_index=-100, reduction="none")
            for ids, wanted in chosen
        ]
    counted = sum(int((wanted[1:] != -100).sum()) for _, wanted in chosen)
    counts = [int((batches.micro_batch(0, index)[1] != -100).sum()) for index in range(plan.micro_batches)]
    assert sum(counts) == counted and len(set(counts)) == len(counts)
    assert result.loss == pytest.approx(float(torch.cat(losses).sum()) / counted, rel=1e-5)


def test_a_step_without_a_token_of_the_assistant_has_a_loss_of_0_and_no_nan(tokens: ChatTokens) -> None:
    batches = ChatBatches(tokens, BatchPlan(2, 1), context=64, seed=0)
    targets = np.array(tokens.targets)
    for window in batches.windows(0):
        for part in tokens.packed(64)[window]:
            targets[part.start : part.stop] = 0
    emptied = ChatBatches(replace(tokens, targets=targets, target_parts=None), BatchPlan(2, 1), context=64, seed=0)
    model = gpt(tokens.vocab_size or 0)
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), token_objective, weight=128)
    result = train_step(step, [emptied.micro_batch(0, 0)], lr=0.1)
    assert result.loss == 0.0 and result.grad_norm == 0.0 and result.updated
    none = replace(tokens, targets=np.zeros_like(targets), target_parts=None)
    with pytest.raises(DataError, match="no tokens of the assistant"):
        ChatBatches(none, BatchPlan(2, 1), context=64, seed=0)


def test_the_conversations_of_a_step_are_named(tokens: ChatTokens) -> None:
    batches = ChatBatches(tokens, BatchPlan(2, 2), context=64, seed=0)
    whole, parts = batches.names(3), [batches.names(3, index) for index in range(2)]
    assert whole == [name for part in parts for name in part] and all("x.jsonl:" in name for name in whole)
