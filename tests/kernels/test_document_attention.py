"""Attention within documents by where they begin: the same as by a mask, in a space that a CUDA graph can keep."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_graphs import MODEL
from torch import Tensor

from drumline.kernels.attention import (
    document_attention,
    document_attention_reference,
    document_bounds,
    documents_in,
    space_for,
)
from drumline.kernels.cuda_graphs import RecordedBackward
from drumline.kernels.gpt import FusedGPT
from drumline.model.build import token_objective
from drumline.model.positions import attention_mask_for
from drumline.train.step import Backward, Precision

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
IDS = st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=4)
"""Documents of sequences of 6 tokens, as anything may number them."""


@given(IDS, st.integers(0, 5))
@settings(max_examples=300)
def test_bounds_are_where_documents_begin_and_all_space_after_them_is_empty(ids: list[list[int]], spare: int) -> None:
    documents = torch.tensor(ids)
    flat = [(row, each) for row, sequence in enumerate(ids) for each in sequence]
    wanted = [place for place in range(len(flat)) if place == 0 or flat[place] != flat[place - 1]]
    assert documents_in(documents) == len(wanted)
    bounds = document_bounds(documents, space=len(wanted) + spare)
    assert bounds.dtype is torch.int32
    assert bounds.tolist() == wanted + [len(flat)] * (spare + 1)


@given(IDS)
@settings(max_examples=50, deadline=None)
def test_attention_by_bounds_is_attention_by_the_mask(ids: list[list[int]]) -> None:
    documents = torch.tensor(ids).cumsum(1)  # no document comes back after another
    q, k, v = torch.randn(3, len(ids), 2, 6, 8, generator=torch.Generator().manual_seed(1))
    mask = attention_mask_for(documents, 6, past=0, device=documents.device)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    got = document_attention(q, k, v, document_bounds(documents, space=40))
    torch.testing.assert_close(got, wanted)


def test_the_space_for_documents_is_enough_and_changes_rarely() -> None:
    spaces = [space_for(count) for count in range(1, 5000)]
    assert all(count <= space <= max(8, 2.5 * count) for count, space in enumerate(spaces, start=1))
    assert len(set(spaces)) < 12


def test_a_recording_keeps_its_space_until_a_micro_batch_has_more_documents() -> None:
    backward = RecordedBackward(Backward(token_objective, Precision.of(torch.device("cpu"), torch.bfloat16), 1))
    fused, ids = FusedGPT(MODEL), torch.zeros(2, 8, dtype=torch.long)

    def space(documents: Tensor | None) -> int:
        backward._space = backward._space_for(fused, (ids, ids, documents))
        return backward._space

    each = torch.arange(8).repeat(2, 1)
    assert [space(part) for part in (ids, each, ids, each // 2)] == [8, 32, 32, 32]
    assert space(None) == 0
    assert fused.space is None


def packed(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of one buffer, as the kernels make them: (B, T, 3, H, W) -> 3 (B, H, T, W)"""
    buffer = torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
    q, k, v = buffer.permute(2, 0, 3, 1, 4)
    return q, k, v


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_attention_of_variable_length_equals_the_reference_with_its_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = packed(4, 256, 3, 6, 64, dtype=torch.bfloat16)
    documents = (torch.rand(4, 256, device="cuda") < 0.05).cumsum(1)
    bounds = document_bounds(documents, space=space_for(documents_in(documents)))
    gradient = torch.randn(4, 256, 6, 64, device="cuda", dtype=torch.bfloat16)
    outs = [attend(q, k, v, bounds) for attend in (document_attention, document_attention_reference)]
    torch.testing.assert_close(*outs, rtol=0.02, atol=0.02)
    for got, wanted in zip(*(torch.autograd.grad(out, (q, k, v), gradient) for out in outs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


def test_a_model_without_the_kernels_masks_as_ever() -> None:
    model = FusedGPT(replace(MODEL, positions="rope"))
    ids = torch.randint(512, (2, 32))
    documents = (torch.arange(32) >= 16).long().repeat(2, 1)
    alone = model(ids[:, 16:])[0][:, -1]
    assert torch.allclose(model(ids, document_ids=documents)[0][:, -1], alone, atol=1e-5)
