"""Attention within documents by where they begin and end: the same as by a mask, with the same gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.interpreted import HAS_TRITON, INTERPRETED, WHY_NOT
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_graphs import MODEL
from torch import Tensor

from drumline.kernels.gpt import FusedGPT
from drumline.model.positions import attention_mask_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # Triton's interpreter makes no products of bfloat16
IDS = st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=4)
"""Documents of sequences of 6 tokens, as anything may number them."""


@pytest.fixture(scope="module")
def attention() -> Any:
    return pytest.importorskip("drumline.kernels.attention", reason="needs Triton")


@given(ids=IDS)
@settings(max_examples=200)
def test_spans_are_where_the_document_of_each_token_begins_and_ends(attention: Any, ids: list[list[int]]) -> None:
    begins, ends = attention.document_spans(torch.tensor(ids)).tolist()
    for row, sequence in enumerate(ids):
        for place in range(len(sequence)):
            begin, end = begins[row][place], ends[row][place]
            assert begin <= place < end
            assert len(set(sequence[begin:end])) == 1
            assert begin == 0 or sequence[begin - 1] != sequence[begin]
            assert end == len(sequence) or sequence[end] != sequence[end - 1]


@given(ids=IDS)
@settings(max_examples=50, deadline=None)
def test_attention_by_spans_is_attention_by_the_mask(attention: Any, ids: list[list[int]]) -> None:
    documents = torch.tensor(ids).cumsum(1)  # no document comes back after another
    q, k, v = torch.randn(3, len(ids), 2, 6, 8, generator=torch.Generator().manual_seed(1))
    mask = attention_mask_for(documents, 6, past=0, device=documents.device)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(
        attention.document_attention_reference(q, k, v, attention.document_spans(documents)), wanted
    )


@pytest.mark.skipif(not HAS_TRITON or (not HOPPER and not INTERPRETED), reason=WHY_NOT)
@pytest.mark.parametrize(
    ("length", "width", "ends"),
    [
        (256, 64, 0.03),
        (200, 32, 0.05),  # no multiple of a tile
        (130, 128, 0.0),  # a single document
        (70, 16, 0.5),  # shorter than a tile
        (64, 256, 0.1),
        (512, 16, 0.004),  # longer than several tiles
    ],
)
def test_attention_within_documents_equals_its_reference_with_its_gradients(
    attention: Any, length: int, width: int, ends: float
) -> None:
    draw = torch.Generator().manual_seed(length)
    documents = (torch.rand(2, length, generator=draw) < ends).cumsum(1)
    buffer = torch.randn(2, length, 3, 2, width, generator=draw).to(DEVICE, HALF)
    gradient = torch.randn(2, length, 2, width, generator=draw).to(DEVICE, HALF)
    spans, results = attention.document_spans(documents.to(DEVICE)), list[Tensor]()
    for attend, dtype in ((attention.document_attention, HALF), (attention.document_attention_reference, torch.double)):
        leaf = buffer.to(dtype, copy=True).requires_grad_()
        q, k, v = leaf.permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, spans)
        results += [out, torch.autograd.grad(out, leaf, gradient.to(dtype))[0]]
    for got, wanted in zip(results[:2], results[2:], strict=True):
        assert ((got - wanted).norm() / wanted.norm()).item() < (1e-3 if INTERPRETED else 5e-3)


def test_a_model_without_the_kernels_masks_as_ever() -> None:
    model = FusedGPT(replace(MODEL, positions="rope"))
    ids = torch.randint(512, (2, 32))
    documents = (torch.arange(32) >= 16).long().repeat(2, 1)
    alone = model(ids[:, 16:])[0][:, -1]
    assert torch.allclose(model(ids, document_ids=documents)[0][:, -1], alone, atol=1e-5)
