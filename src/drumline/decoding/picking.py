"""The ends of a step in Triton: embeddings of the newest tokens, and the tokens that are sampled from logits.

What is sampled is what sampling.py samples, up to the rounding of logarithms.

Shapes: B texts, V vocabulary, D d_model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.decoding.sampling import LEAST_TEMPERATURE, Kind
from drumline.decoding.state import State

_CHUNK = 2048
_KINDS = {"greedy": 0, "free": 1, "limited": 2}


def embed(state: State, out: Tensor, *, tokens: Tensor, smear: Tensor | None, positions: Tensor | None) -> Tensor:
    """The embeddings of the first B slots' newest tokens, written to `out`, (B, D)."""
    width = out.size(1)
    _embed_kernel[(len(out),)](
        state.ids, state.previous, state.lengths, tokens, smear, positions, out, state.positions, width,
        SMEARS=smear is not None, PLACES=positions is not None, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


def pick(logits: Tensor, kind: Kind, state: State, *, vocabulary: int) -> None:
    """Sample a token for each of the first B slots that is ready, and let its text go on: float32 (B, _)"""
    texts, stride = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    least = logits.new_empty(texts if kind == "limited" else 0)
    if kind == "limited":
        _least_kernel[(texts,)](
            logits, least, state.temperatures, state.top_ks, state.top_ps, vocabulary, stride,
            COLDEST=LEAST_TEMPERATURE, BLOCK=_CHUNK, num_warps=16,
        )  # fmt: skip
    best = logits.new_empty(texts, chunks)
    ids = torch.empty(texts, chunks, dtype=torch.int32, device=logits.device)
    _best_kernel[(texts, chunks)](
        logits, least, state.temperatures, state.seeds, state.draws, best, ids, vocabulary, stride, chunks,
        KIND=_KINDS[kind], COLDEST=LEAST_TEMPERATURE, BLOCK=_CHUNK, num_warps=8,
    )  # fmt: skip
    _go_on_kernel[(texts,)](
        best, ids, state.ids, state.previous, state.lengths, state.draws, state.ready, chunks,
        BLOCK=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip


@triton.jit
def _embed_kernel(
    ids, previous, lengths, tokens, smear, positions, out, most, width, SMEARS: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one text."""
    text = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = out.dtype.element_ty
    value = tl.load(tokens + tl.load(ids + text) * width + column, mask=inside, other=0.0).to(tl.float32)
    if SMEARS:
        before = tl.load(tokens + tl.load(previous + text) * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(smear + column, mask=inside, other=0.0).to(tl.float32)
        value = (value + (share * before).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if PLACES:
        place = tl.minimum(tl.load(lengths + text), most - 1)
        value += tl.load(positions + place * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + text * width + column, value.to(dtype), mask=inside)


@triton.jit
def _scores(logits, text, column, inside, stride, temperature, COLDEST: tl.constexpr):
    """Logits by the temperature; greedy texts have 0 of it, and their logits stay."""
    value = tl.load(logits + text.to(tl.int64) * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    return value / tl.where(temperature == 0.0, 1.0, tl.maximum(temperature, COLDEST))


@triton.jit
def _ordered(score):
    """32 bits that are ordered as the numbers are."""
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _amount(
    logits, text, vocabulary, stride, temperature, bound, most, COUNTS: tl.constexpr, COLDEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the tokens whose score is at least the bound: their number, or their probabilities, up to a factor."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        score = _scores(logits, text, column, inside, stride, temperature, COLDEST)
        weight = tl.exp(score - most)
        if COUNTS:
            weight = tl.full((BLOCK,), 1.0, dtype=tl.float32)
        total += tl.where(inside & (_ordered(score) >= bound), weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _least_kernel(
    logits, least, temperatures, top_ks, top_ps, vocabulary, stride, COLDEST: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the smallest score that one text's top_k and then top_p leave, bit by bit from the highest one."""
    text = tl.program_id(0)
    temperature = tl.load(temperatures + text)
    top_k = tl.minimum(tl.load(top_ks + text), vocabulary).to(tl.float32)
    top_p = tl.load(top_ps + text)
    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, _scores(logits, text, column, column < vocabulary, stride, temperature, COLDEST))
    most = tl.max(highest, axis=0)
    one = (text * 0 + 1).to(tl.uint32)
    kept = one - one
    if top_k < vocabulary:
        bit = one << 31
        for _ in range(32):
            higher = kept | bit
            bit = bit >> 1
            number = _amount(logits, text, vocabulary, stride, temperature, higher, most, True, COLDEST, BLOCK)
            kept = tl.where(number >= top_k, higher, kept)
    if top_p < 1.0:
        enough = top_p * _amount(logits, text, vocabulary, stride, temperature, kept, most, False, COLDEST, BLOCK)
        bound = one - one
        bit = one << 31
        for _ in range(32):
            higher = bound | bit
            bit = bit >> 1
            both = tl.maximum(higher, kept)
            chance = _amount(logits, text, vocabulary, stride, temperature, both, most, False, COLDEST, BLOCK)
            bound = tl.where(chance >= enough, higher, bound)
        kept = tl.maximum(kept, bound)
    bits = tl.where((kept >> 31) == 1, kept ^ 0x80000000, kept ^ 0xFFFFFFFF)
    score = bits.to(tl.float32, bitcast=True)
    tl.store(least + text, tl.where(kept == 0, float("-inf"), score))


@triton.jit
def _mixed(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _noise(seed, draw, token):
    """As sampling.py makes it, of int64, int64 and the tokens."""
    low, high, place = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), draw.to(tl.uint32)
    first = _mixed(low ^ _mixed(high ^ _mixed(place + 0x9E3779B9)))
    second = _mixed(first ^ 0x846CA68B)
    hashed = _mixed(_mixed(token.to(tl.uint32) * 0x9E3779B9 + first) ^ second)
    uniform = ((hashed >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best_kernel(
    logits, least, temperatures, seeds, draws, best, ids, vocabulary, stride, chunks, KIND: tl.constexpr,
    COLDEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the best token of a chunk of one text's logits."""
    text, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    temperature = tl.load(temperatures + text)
    score = _scores(logits, text, column, inside, stride, temperature, COLDEST)
    if KIND == 2:
        score = tl.where(score < tl.load(least + text), float("-inf"), score)
    if KIND > 0:
        noise = _noise(tl.load(seeds + text), tl.load(draws + text), column)
        score = tl.where(temperature == 0.0, score, score + noise)
    value, place = tl.max(score, axis=0, return_indices=True)
    tl.store(best + text * chunks + chunk, value)
    tl.store(ids + text * chunks + chunk, chunk * BLOCK + place)


@triton.jit
def _go_on_kernel(best, ids, newest, previous, lengths, draws, ready, chunks, BLOCK: tl.constexpr):
    """One program: the best token of all chunks becomes the newest one of a text that is ready."""
    text = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    value = tl.load(best + text * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    highest = tl.max(value, axis=0)
    token = tl.load(ids + text * chunks + chunk, mask=chunk < chunks, other=2147483647)
    token = tl.min(tl.where(value == highest, token, 2147483647), axis=0)
    if tl.load(ready + text):
        tl.store(previous + text, tl.load(newest + text))
        tl.store(newest + text, token.to(tl.int64))
        tl.store(lengths + text, tl.load(lengths + text) + 1)
        tl.store(draws + text, tl.load(draws + text) + 1)
