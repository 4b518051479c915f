"""The Trainer in the forms that tutorials use: positional, with a DataLoader, a GPU or a snapshot, and train(n)."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import drumline
from drumline import GPTConfig, GPTLike, GPTModel, Trainer
from drumline.errors import ConfigError
from drumline.report.records import read_metrics
from drumline.trainer.sameness import fingerprint
from drumline.trainer.samples import source_of


def load_train_objs(samples: int = 16) -> tuple[TensorDataset, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = TensorDataset(torch.rand(samples, 8), torch.rand(samples, 1))
    return data, model, torch.optim.SGD(model.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tutorial.py"])


def test_a_gpu_and_save_every_then_train(tmp_path: Path) -> None:
    data, model, optimizer = load_train_objs()
    loader = DataLoader(data, batch_size=4, shuffle=False, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    result = Trainer(model, loader, optimizer, 0, 2).train(5)
    assert result.step == 5 * 4
    kept = {path.name for path in (tmp_path / "runs/tutorial/checkpoints").iterdir()}
    assert kept == {"step-00000008", "step-00000016", "step-00000020"}  # epochs 2, 4 and the last


def test_a_snapshot_is_written_with_every_save_and_a_new_run_starts_from_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model, optimizer = load_train_objs()
    Trainer(model, DataLoader(data, batch_size=4, shuffle=True), optimizer, "snapshot.pt", 1).train(3)
    snapshot = torch.load("snapshot.pt", weights_only=True)
    assert list(range(snapshot["EPOCHS_RUN"], 5)) == [3, 4]  # an int, as the tutorial's range() needs
    assert all(torch.equal(tensor, snapshot["MODEL_STATE"][name]) for name, tensor in model.state_dict().items())
    monkeypatch.setattr("sys.argv", ["elsewhere.py"])
    data, model, optimizer = load_train_objs()
    assert Trainer(model, DataLoader(data, batch_size=4, shuffle=True), optimizer, "snapshot.pt", 1).train(4).step == 16
    assert "resuming from snapshot.pt (step 12)" in capsys.readouterr().out


def spawned(rank: int, size: int, port: int) -> str:
    """As mp.spawn calls it: there is no launcher, and the script makes the process group itself."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    data, model, optimizer = load_train_objs()
    loader = DataLoader(data, batch_size=4, shuffle=False, sampler=DistributedSampler(data))
    try:
        return Trainer(model, loader, optimizer, rank, 10, run_dir="spawned").train(2).weights_sha256
    finally:
        dist.destroy_process_group()


def test_ranks_of_a_process_group_that_the_script_made_train_together() -> None:
    from drumline.network.interfaces import free_port

    port = free_port()
    outcomes = run_ranks(spawned, [(rank, 2, port) for rank in (0, 1)])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert outcomes[0].value == outcomes[1].value
    assert "batch_size 4 x 2 ranks x 1 accumulated = 8 samples" in outcomes[0].out and not outcomes[1].out


def two_in_a_row(seed: int) -> list[str]:
    hashes = []
    for name in ("first", "second"):
        data, model, optimizer = load_train_objs()
        trainer = Trainer(model, data, optimizer, batch_size=4, run_dir=name, device="cpu", seed=seed)
        hashes.append(trainer.fit(epochs=1).weights_sha256)
    return hashes


def test_a_script_may_train_twice_on_several_ranks() -> None:
    outcomes = run_ranks(two_in_a_row, [(1,), (1,)])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert outcomes[0].value == outcomes[1].value and outcomes[0].value[0] == outcomes[0].value[1]


class Drawn(Dataset[Any]):
    """Draws each sample anew, as toy datasets do."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(50, (8,)), "labels": torch.randint(50, (8,))}


def on_drawn_data(seed: int) -> str:
    torch.manual_seed(seed)  # other numbers on each rank
    model = GPTLike(50, 8, n_layers=1, n_heads=1, d_model=8)
    optimizer = torch.optim.AdamW(model.parameters())
    return (
        Trainer(model, Drawn(), optimizer, batch_size=2, run_dir="drawn", device="cpu")
        .fit(total_steps=3)
        .weights_sha256
    )


def test_a_dataset_that_draws_its_samples_is_not_taken_for_different_data() -> None:
    outcomes = run_ranks(on_drawn_data, [(1,), (2,)])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert outcomes[0].value == outcomes[1].value


def on_own_data(seed: int, drawn_once: bool) -> None:
    torch.manual_seed(seed)
    data: Any = TensorDataset(torch.rand(16, 8), torch.rand(16, 1))
    if not drawn_once:
        data = [{"input": torch.full((8,), float(seed))}]
    model = nn.Linear(8, 1)
    Trainer(model, data, torch.optim.SGD(model.parameters(), lr=0.1), batch_size=4, run_dir="own", device="cpu")


@pytest.mark.parametrize("drawn_once", [True, False])
def test_ranks_with_different_data_are_refused(tmp_path: Path, drawn_once: bool) -> None:
    outcomes = run_ranks(on_own_data, [(1, drawn_once), (2, drawn_once)])
    assert all("ConfigError: each rank has other data" in outcome.err for outcome in outcomes)
    assert not (tmp_path / "own").exists()


def test_a_fingerprint_is_of_what_samples_contain() -> None:
    samples: list[Any] = [1, "a", [1, "a"], {"x": 1}, {"x": torch.ones(2)}, np.ones(2), torch.ones(2), True, None, b"a"]
    prints = [fingerprint(source_of([sample])) for sample in samples]
    assert len(set(prints)) == len(samples)
    assert prints == [fingerprint(source_of([sample])) for sample in samples]
    assert fingerprint(source_of([object()])) == fingerprint(source_of([object()]))
    assert fingerprint(source_of(Drawn())) == "drawn at random"


def test_without_a_loss_classes_get_cross_entropy_and_numbers_squared_error() -> None:
    inputs = torch.randn(12, 3)
    wanted = {"classes": (torch.arange(12) % 4, 4), "numbers": (inputs.sum(1, keepdim=True), 1)}
    for name, (targets, width) in wanted.items():
        model = nn.Linear(3, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(model, TensorDataset(inputs, targets), optimizer, run_dir=name, device="cpu").fit(epochs=1, log_every=1)
        first = read_metrics(Path(name) / "metrics.jsonl")[0]["loss"]
        assert first > 0
    assert "by cross_entropy" in Path("classes/train.log").read_text()
    assert "by mse_loss" in Path("numbers/train.log").read_text()


def test_samples_that_the_model_or_the_loss_cannot_take_are_refused() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="the samples have x, y, but Linear takes input"):
        Trainer(model, [{"x": torch.zeros(8), "y": 1}], optimizer, device="cpu")
    with pytest.raises(ConfigError, match="the samples have 1 parts"):
        Trainer(model, TensorDataset(torch.zeros(4, 8)), optimizer, loss=nn.MSELoss(), device="cpu")


def test_a_loader_with_an_order_of_its_own_is_refused() -> None:
    from torch.utils.data import WeightedRandomSampler

    data, model, optimizer = load_train_objs()
    loader = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 16, 16))
    with pytest.raises(ConfigError, match="chooses its samples by WeightedRandomSampler"):
        Trainer(model, loader, optimizer)


def test_the_gpt_has_the_names_that_tutorials_use() -> None:
    config = GPTConfig(vocab_size=20, max_position_embeddings=8, n_layers=1, n_heads=2, d_model=8, d_ff=16, dropout=0.1)
    assert GPTModel is drumline.GPT
    model = GPTLike(20, 8, n_layers=1, n_heads=2, d_model=8, d_ff=16)
    assert model.config == config
    ids = torch.zeros(1, 8, dtype=torch.long)
    logits, loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    assert logits.shape == (1, 8, 20) and loss.ndim == 0
