"""Trainer with sharding: any model, the same run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drumline.errors import DrumlineError
from drumline.report.records import read_metrics
from drumline.sharding.wrapping import named_units, repeated_blocks
from drumline.train.loop import FitResult
from drumline.trainer.trainer import Trainer


class Blocks(nn.Module):
    """Three equal blocks between two layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(x)


class Normed(Blocks):
    """Its norm counts micro-batches, in a buffer without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.chain = nn.Sequential(nn.Identity(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.chain(self.norm(x)))


def fit(run_dir: str, seed: int = 0, **settings: Any) -> str:
    torch.manual_seed(seed)
    return str(trained(Blocks(), run_dir, **settings).weights_sha256)


def trained(model: nn.Module, run_dir: str, **settings: Any) -> FitResult:
    """optimizer: makes one of the model"""
    inputs = torch.linspace(-1.0, 1.0, 61 * 4).view(61, 4)
    data = TensorDataset(inputs, inputs.argmax(1))
    make = settings.pop("optimizer", lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    more = {"valid_dataset": TensorDataset(*data[:21]), "batch_size": 2, "global_batch_size": 10, **settings}
    trainer = Trainer(model, data, make(model), run_dir=run_dir, device="cpu", bitwise=True, grad_clip=0.5, **more)
    return trainer.fit(total_steps=6, save_every=3, eval_every=3)


def sharded(rank: int, run_dir: str, settings: dict[str, Any]) -> str:
    return fit(run_dir, rank, **settings)  # ranks that draw other weights get those of rank 0


def learned(rank: int, run_dir: str, settings: dict[str, Any]) -> tuple[list[Any], int]:
    """The trained weights of a model with a norm, and how many micro-batches that norm has counted."""
    torch.manual_seed(rank)
    model = Normed()
    trained(model, run_dir, **settings)
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    return [each.tolist() for each in whole], int(model.norm.num_batches_tracked or 0)


def values(run_dir: str, key: str) -> list[float]:
    return [record[key] for record in read_metrics(Path(run_dir) / "metrics.jsonl") if key in record]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"shard": "full"}),
        (3, {"shard": "full", "shard_units": ["blocks", "out"]}),
        (4, {"shard": 2, "shard_units": ["into"]}),
    ],
)
def test_a_script_that_shards_its_model_gets_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = fit("alone")
    outcomes = run_ranks(sharded, [(rank, "sharded", settings) for rank in range(ranks)])
    assert [outcome.value for outcome in outcomes] == [alone] * ranks, outcomes[0].err
    assert values("sharded", "valid_loss") == pytest.approx(values("alone", "valid_loss"), rel=1e-5)
    # What sharded ranks have saved goes on in one process.
    assert fit("after", resume_from="sharded/checkpoints/step-00000003") == alone


def test_a_model_with_batch_norm_is_sharded_and_goes_on_at_another_sharding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone, counted = learned(0, "alone", {})
    assert counted == 6 * 5
    halves = run_ranks(learned, [(rank, "halves", {"shard": "full"}) for rank in range(2)])
    assert [each.value and each.value[0] for each in halves] == [alone] * 2, halves[0].err
    assert halves[0].value[1] == 6 * 3  # of 5 micro-batches, rank 0 has 3
    more = {"shard": 2, "resume_from": "halves/checkpoints/step-00000003"}
    groups = run_ranks(learned, [(rank, "groups", more) for rank in range(4)])
    assert [each.value and each.value[0] for each in groups] == [alone] * 4, groups[0].err
    assert groups[0].value[1] == 3 * 3 + 3 * 2


class Tied(Blocks):
    """Two of its blocks have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight


class Half(Blocks):
    """Its last layer has another dtype than the first, which is gathered with it."""

    def __init__(self) -> None:
        super().__init__()
        self.out.bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2])


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


FULL: dict[str, Any] = {"shard": "full"}
MISTAKES: list[tuple[type[nn.Module], dict[str, Any], str]] = [
    (Blocks, {**FULL, "shard_units": ["block"]}, "no module 'block' for shard_units\nuse names like into"),
    (Blocks, {"shard": 3}, "cannot be divided into groups of 3"),
    (Blocks, {**FULL, "dtype": "float16"}, "float16"),
    (Blocks, {**FULL, "optimizer": muon}, "torch.optim.Muon mixes the rows of a weight, which sharding gives to diff"),
    (Blocks, {**FULL, "optimizer": adafactor}, "torch.optim.Adafactor mixes the rows"),
    (Tied, FULL, "the weight blocks.0.weight is used in several places, one of them in a Linear"),
    (Tied, {**FULL, "shard_units": "blocks.0"}, "the weight blocks.0.weight is used in several places"),
    (Half, FULL, "out.bias is bfloat16, and into.weight, which is gathered together with it, is float32"),
    (Blocks, {"shard": "ful"}, "shard is 'ful'\ngive none, full, host, or a whole number"),
    (Blocks, {"shard": None}, "shard is None"),
    (Blocks, {"shard": 1.5}, "shard is 1.5"),
    (Blocks, {"shard": True}, "shard is True"),
    (Blocks, {**FULL, "shard_units": ["blocks", "blocks.0"]}, "shard_units has blocks.0 twice"),
    (Normed, {**FULL, "shard_units": ["chain", "chain.1"]}, "both chain and chain.1, one of which is inside"),
    (Normed, {**FULL, "shard_units": ["chain.1", "chain"]}, "both chain.1 and chain, one of which is inside"),
]


def said_of_mistakes() -> list[str]:
    said = []
    for kind, settings, _ in MISTAKES:
        try:
            trained(kind(), "run", **settings)
            said.append("nothing")
        except DrumlineError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_sharded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes = run_ranks(said_of_mistakes, [(), ()])
    assert all(outcome.code == 0 for outcome in outcomes), outcomes[0].err
    for said, (_, settings, problem) in zip(outcomes[0].value, MISTAKES, strict=True):
        assert problem in said and len(said.splitlines()) == 2, settings


@pytest.mark.parametrize(
    "units", ["blocks", ["nested.0.1", "nested.1"]], ids=["one name", "a list of lists, and what is in it"]
)
def test_units_may_be_one_name_or_lists_of_lists(units: Any) -> None:
    model = nn.ModuleDict({"blocks": Blocks().blocks, "nested": nn.ModuleList([Blocks().blocks, Blocks().blocks])})
    found = named_units(model, units)
    lists = {"blocks": [*model["blocks"]]}
    assert found == lists.get(str(units), [model["nested"][0][1], *model["nested"][1]])
    assert repeated_blocks(model["nested"]) in ([*each] for each in model["nested"])


def test_settings_of_shards_do_nothing_without_them_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fit("run", shard_units="blocks", snapshot_copies=2)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: shard_units does nothing without shard: no weights are gathered",
        "note: snapshot_copies does nothing without shard: each host has all of a snapshot anyway",
    ]
    fit("plain")
    assert "note: " not in capsys.readouterr().out
