"""nanoGPT's ckpt.pt: read without running code, with the logits that nanoGPT computes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.cli.app import run_command
from drumline.generate.loading import load_run

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "vocab_size": 70, "dropout": 0.0}


class Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.bias = nn.Parameter(torch.randn(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Block(nn.Module):
    """As in nanoGPT, with its names and without its fast attention."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = Norm(width, bias), Norm(width, bias)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width, bias=bias), "c_proj": nn.Linear(width, width, bias=bias)}
        )
        self.attn.register_buffer("bias", torch.tril(torch.ones(24, 24))[None, None])  # its mask is in the file
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=bias), "c_proj": nn.Linear(4 * width, width, bias=bias)}
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attn["c_attn"](self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.attn.bias[:, :, :length, :length] == 0, float("-inf"))  # type: ignore[index]
        y = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.attn["c_proj"](y)
        return x + self.mlp["c_proj"](nn.GELU()(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        width = int(SHAPE["n_embd"])
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(int(SHAPE["vocab_size"]), width),
                "wpe": nn.Embedding(int(SHAPE["block_size"]), width),
                "h": nn.ModuleList(Block(width, int(SHAPE["n_head"]), bias) for _ in range(int(SHAPE["n_layer"]))),
                "ln_f": Norm(width, bias),
            }
        )
        self.lm_head = nn.Linear(width, int(SHAPE["vocab_size"]), bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Any:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.size(1)))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def saved(path: Path, *, bias: bool, wrapper: str = "") -> NanoGPT:
    torch.manual_seed(0)
    model = NanoGPT(bias)
    optimizer = torch.optim.AdamW(model.parameters())
    content = {
        "model": {wrapper + name: tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": {**SHAPE, "bias": bias},
        "iter_num": 5,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": "shakespeare", "learning_rate": 1e-3},
    }
    torch.save(content, path)
    return model


@pytest.mark.parametrize(("bias", "wrapper"), [(True, ""), (False, "_orig_mod.")])
def test_a_checkpoint_of_nanogpt_gives_nanogpts_logits(
    bias: bool, wrapper: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = saved(here / "ckpt.pt", bias=bias, wrapper=wrapper)
    assert run_command(["import", "ckpt.pt", "-o", "run"]) == 0
    assert "wrote run: nanoGPT, vocabulary 70" in capsys.readouterr().out
    ids = torch.randint(70, (2, 24))
    with torch.no_grad():
        assert torch.allclose(load_run(Path("run")).model.eval()(ids)[0], theirs(ids), atol=1e-5)
    assert run_command(["export", "run", "-o", "gpt2"]) == 0
    assert "wrote gpt2: GPT2LMHeadModel" in capsys.readouterr().out


def test_it_trains_on_nanogpts_tokens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(here / "ckpt.pt", bias=False)
    torch.randint(70, (5000,), dtype=torch.int32).to(torch.uint16).numpy().tofile(here / "train.bin")
    words = "--train_data_path train.bin --batch_size 4 --total_steps 3 --device cpu --run_dir run --context 8".split()
    assert run_command(["train", "--init_from", "ckpt.pt", *words]) == 0
    assert "from   ckpt.pt: nanoGPT, 8 of its 24 positions" in capsys.readouterr().out


class Harm:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": {}, "model_args": SHAPE, "harm": Harm()}, "could run any code when loaded"),
        ({"model": {}}, "is no checkpoint of nanoGPT"),
        ({"format": 2, "model": {}}, "is a checkpoint of drumline"),
        ({"model": {}, "model_args": {"n_layer": 2}}, "damaged model_args"),
        ({"model": {}, "model_args": {**SHAPE, "bias": False}}, "transformer.wte.weight is missing"),
        ({"model": {"a": 1}, "model_args": {**SHAPE, "bias": False}}, "something other than tensors"),
    ],
)
def test_other_files_are_refused_and_no_code_runs(
    content: dict[str, Any], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, here / "ckpt.pt")
    assert run_command(["import", "ckpt.pt", "-o", "run"]) == 1
    shown = capsys.readouterr()
    assert said in shown.err and "code ran" not in shown.out
    assert not (here / "run").exists()


def test_a_damaged_file_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(here / "ckpt.pt", bias=True)
    (here / "ckpt.pt").write_bytes((here / "ckpt.pt").read_bytes()[:-2000])
    assert run_command(["import", "ckpt.pt", "-o", "run"]) == 1
    assert "is damaged, or no file of torch.save" in capsys.readouterr().err
