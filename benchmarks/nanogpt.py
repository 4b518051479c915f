"""nanoGPT's model and training, written plainly: what drumline's speed and recipe on a GPU are measured against.

Its defaults: no biases, exact GELU, learned positions, tied embeddings; compiled whole, autocast to bfloat16, fused
AdamW whose decay spares the norms, a cosine to a tenth after a warmup, clipping. From drumline it takes the tokens, the
order in which windows are visited, and the evaluation of validation text, so that both sides have the same.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumline.config.model import GPTConfig
from drumline.config.settings import OptimConfig
from drumline.data.batches import visit_order
from drumline.data.opening import open_tokens
from drumline.data.tokens import TokenFile
from drumline.optim.optimizers import learning_rate
from drumline.parallel.hardware import allow_tf32, pick_dtype
from drumline.parallel.world import Place, World
from drumline.train.evaluation import evaluate
from drumline.train.step import Precision

WARM_STEPS = 5
"""Steps before the clock starts, which are undone: they compile, load and take memory for the first time."""


class NanoGPT(nn.Module):
    """The baseline's model; of the config it takes shape, vocabulary and context."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.places = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.blocks = nn.ModuleList(NanoBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layers) if residual else 0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats: int64 (B, T) twice -> scalar. A target of -100 does not count."""
        x = self.embed(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class NanoBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.n_heads
        self.n1, self.n2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.n1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, d))
        output: Tensor = x + self.down(F.gelu(self.up(self.n2(x))))
        return output


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What came of one pass over the text."""

    steps: int
    tokens: int
    seconds: float
    """Of the steps alone, warm from the first."""
    valid_loss: float
    """Over all validation text, nats a token."""
    train_loss: float
    """Of the last step."""


class Baseline:
    """nanoGPT's training; one compiled model for all settings, which starts each time from the same weights."""

    def __init__(self, tokens: Path, shape: dict[str, Any], *, context: int, device: torch.device) -> None:
        """shape: as drumline's presets have it"""
        self._device, self._context, self._on_gpu = device, context, device.type == "cuda"
        train, self._valid = (open_tokens(tokens, split=split) for split in ("train", "valid"))
        assert train.vocab_size is not None
        allow_tf32()
        torch.manual_seed(0)
        self._model = NanoGPT(GPTConfig(vocab_size=train.vocab_size, max_position_embeddings=context, **shape))
        self._model.to(device)
        self._start = {name: value.clone() for name, value in self._model.state_dict().items()}
        # Each batch size is compiled for itself, as it would be alone.
        self._forward: Any = torch.compile(self._model, dynamic=False) if self._on_gpu else self._model
        self._inputs, self._targets = _windows(train, context, device)

    def epoch(self, lr: float, batch: int) -> Epoch:
        """Train for one epoch of whole batches, and judge."""
        steps = len(self._inputs) // batch
        self._steps(WARM_STEPS, lr, batch, of=steps)
        seconds, train_loss = self._steps(steps, lr, batch, of=steps)
        evaluation = evaluate(
            self._model,  # not compiled: the last batch has another size
            _summed_loss,
            self._valid,
            context=self._context,
            batch_size=batch,
            precision=Precision.of(self._device, pick_dtype("auto", self._device)),
            world=World(Place(), self._device),
        )
        assert evaluation.tokens == len(self._valid) - 1, "not all of the validation text was evaluated"
        tokens = steps * batch * self._context
        return Epoch(steps=steps, tokens=tokens, seconds=seconds, valid_loss=evaluation.loss, train_loss=train_loss)

    def _steps(self, steps: int, lr: float, batch: int, *, of: int) -> tuple[float, float]:
        """The first steps of an epoch from the first weights: the seconds they took, and the last one's loss."""
        self._model.load_state_dict(self._start)
        groups = [
            {"params": [p for p in self._model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self._model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        schedule = OptimConfig(lr=lr, schedule="cosine", warmup_steps=100, min_lr_ratio=0.1)
        order = visit_order(np.arange(len(self._inputs)), items=len(self._inputs), seed=0)
        batches = torch.from_numpy(order[: steps * batch]).to(self._device).view(steps, batch)
        loss = torch.zeros(())
        self._wait()
        began = time.perf_counter()
        for step, rows in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, schedule, total_steps=of)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._on_gpu):
                loss = self._forward(self._inputs[rows], self._targets[rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._wait()
        return time.perf_counter() - began, loss.item()

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def _windows(tokens: TokenFile, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """All whole windows of a file and their next tokens: int64 (windows, context) each."""
    flat = torch.from_numpy(tokens.read(0, len(tokens))).to(device)
    count = (len(flat) - 1) // context
    inputs, targets = flat[: count * context], flat[1 : count * context + 1]
    return inputs.view(count, context), targets.view(count, context)


def _summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor, None]) -> Tensor:
    loss: Tensor = model(batch[0], batch[1]) * (batch[1] != -100).sum()
    return loss
