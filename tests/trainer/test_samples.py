"""What a step reads depends on the seed and the step alone: not on workers, and not on the loader that was given."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drumline.data import BatchPlan
from drumline.errors import ConfigError, DataError
from drumline.trainer.samples import DatasetBatches, source_of
from drumline.trainer.trainer import Trainer


class Augmented(Dataset[Any]):
    """Samples with noise from every source of random numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(3) + random.random() + np.random.rand()
        return torch.full((3,), float(index)) + noise, torch.zeros(1)


def pairs(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([sample[0] for sample in samples]) / 10, torch.stack([sample[1] for sample in samples])


def train(run_dir: str | Path, **settings: Any) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    common: dict[str, Any] = {"loss": F.mse_loss, "run_dir": run_dir, "device": "cpu"}
    data = settings.pop("data", Augmented())
    return Trainer(model, data, optimizer, **common, **settings).fit(total_steps=6).weights_sha256


def on_ranks(how: str) -> str:
    loader = DataLoader(Augmented(), batch_size=2, shuffle=True, collate_fn=pairs, num_workers=2)
    return train(how, data=loader, global_batch_size=8, bitwise=True)


def test_workers_and_ranks_change_nothing_about_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"batch_size": 2, "global_batch_size": 8, "bitwise": True, "collate_fn": pairs}
    alone = train("alone", **settings)
    assert train("workers", **settings, num_workers=2) == alone
    outcomes = run_ranks(on_ranks, [("ranks",)] * 2)
    assert [outcome.value for outcome in outcomes] == [alone, alone], outcomes


def test_a_loader_gives_its_dataset_batch_size_collate_fn_and_workers_and_arguments_override_them() -> None:
    loader = DataLoader(Augmented(), batch_size=5, shuffle=False, collate_fn=pairs, num_workers=1, prefetch_factor=3)
    source = source_of(loader)
    assert (source.batch_size, source.shuffle, source.collate, source.workers) == (5, False, pairs, 1)
    assert source.worker_options["prefetch_factor"] == 3
    changed = source_of(loader, batch_size=2, shuffle=True, num_workers=0)
    assert (changed.batch_size, changed.shuffle, changed.workers) == (2, True, 0)


def test_without_shuffling_samples_come_in_their_order_on_any_number_of_ranks() -> None:
    source = source_of(DataLoader([*range(10)], batch_size=2, shuffle=False))  # type: ignore[arg-type]
    batches = DatasetBatches(source, BatchPlan(2, 2), seed=3)
    read = [batches.micro_batch(step, index).tolist() for step in range(3) for index in range(2)]
    assert read == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]
    assert batches.names(2) == ["sample 8", "sample 9", "sample 0", "sample 1"]


def test_a_run_that_goes_back_reads_the_same_again_with_workers() -> None:
    source = source_of([*range(10)], batch_size=2, num_workers=1)
    batches = DatasetBatches(source, BatchPlan(2, 1), seed=3)
    steps = (0, 1, 2, 1, 2, 3)
    read = [batches.micro_batch(step, 0).tolist() for step in steps]
    batches.close()
    plain = DatasetBatches(source_of([*range(10)], batch_size=2), BatchPlan(2, 1), seed=3)
    assert read == [plain.micro_batch(step, 0).tolist() for step in steps]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([1])


@pytest.mark.parametrize(
    ("data", "error", "problem"),
    [
        (Endless(), DataError, "Endless can only be read from its beginning"),
        ([], DataError, "the dataset has no samples"),
        (DataLoader([1, 2], batch_size=None), ConfigError, "chooses its samples by"),  # type: ignore[arg-type]
        (DataLoader(Endless(), batch_size=2), (ConfigError, DataError), "Endless|chooses"),
    ],
)
def test_data_that_ranks_cannot_share_is_refused(data: Any, error: Any, problem: str) -> None:
    with pytest.raises(error, match=problem):
        source_of(data)
