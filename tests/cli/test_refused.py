"""A command that is refused writes nothing: not into a run, nor anywhere else."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.small import small
from torch import Tensor, nn, optim, randn
from torch.utils.data import TensorDataset

from drumline import Trainer
from drumline.cli.app import run_command
from drumline.config.model import GPTConfig
from drumline.files.verified import STAMPS

Files = dict[str, bytes | None]


def files(folder: Path) -> Files:
    """Every file and folder with its bytes, but for when prepared data were verified last."""
    found = (path for path in folder.rglob("*") if path.name != STAMPS)
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


class Mean(nn.Module):
    """A model with a loss of the wrong kind."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, input_ids: Tensor, *, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.table(input_ids)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def broken(config: GPTConfig) -> nn.Module:
    raise RuntimeError("a mistake of the user")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with text, a run, a run of a Trainer, and other files."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text").mkdir()
        for number in range(30):
            Path(f"text/{number}.txt").write_text(f"Document {number}. " + "All work and no play. " * 12)
        Path("bad.txt").write_bytes(b"caf\xe9 " * 200)
        Path("short.txt").write_text("a few words")
        np.arange(4000, dtype="<u4").tofile("wide.bin")
        assert run_command(["train", *small("--train_data_path", "text", "--run_dir", "run", "--save_every", "3")]) == 0
        linear, data = nn.Linear(4, 1), TensorDataset(randn(32, 4), randn(32, 1))
        trainer = Trainer(
            linear, data, optim.SGD(linear.parameters(), 1e-3), loss=nn.functional.mse_loss, run_dir="linear"
        )
        trainer.fit(epochs=1)
        yield folder


RUN = ["--train_data_path", "text", "--run_dir"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", *small(*RUN, "run", "--lr", "0.5")],
        ["train", *small(*RUN, "run", "--total_steps", "9", "--allow_change", "totl_steps")],
        ["train", *small(*RUN, "run", "--total_steps", "9", "--allow_change", "lr")],
        ["train", *small(*RUN, "run", "--seed", "3", "--allow_change", "seed", "--vocab_size", "280")],
        ["train", *small(*RUN, "run", "--d_model", "32", "--allow_change", "d_model")],
        ["train", *small("--train_data_path", "short.txt", "--run_dir", "run")],
        ["train", *small("--train_data_path", "nowhere.bin", "--run_dir", "run")],
        ["train", *small(*RUN, "run", "--resume_from", "5")],
        ["train", *small(*RUN, "linear")],
        ["train", *small(*RUN, "new", "--resume_from", "linear")],
        ["train", *small(*RUN, "new", "--resume_from", "run", "--d_model", "32")],
        ["train", *small(*RUN, "new", "--resume_from", "nowhere")],
        ["train", *small(*RUN, "a/b/new", "--model", f"{__name__}:Mean")],
        ["train", *small(*RUN, "new", "--model", f"{__name__}:Missing")],
        ["train", *small(*RUN, "new", "--sink", "nowhere:Sink")],
        ["train", *small(*RUN, "new", "--optimizer", "nowhere:make")],
        ["train", *small(*RUN, "new", "--context", "14", "--short_contexts", "0.5")],
        ["train", *small("--train_data_path", "bad.txt", "--run_dir", "new", "--data_dir", "other/data")],
        ["train", *small("--train_data_path", "short.txt", "--data_dir", "data2")],
        ["train", *small("--train_data_path", "wide.bin", "--run_dir", "new")],
        ["train", *small(*RUN, "new", "--config", "nowhere.toml")],
        ["train", *small(*RUN, "short.txt")],
        ["train", "--no_such_flag"],
        ["prepare", "bad.txt", "--out", "a/b"],
        ["prepare", "nowhere", "--out", "a/b"],
        ["prepare", "text", "--out", "text/inside"],
        ["prepare", "text", "--out", "run"],
        ["evaluate", "run", "--data", "wide.bin"],
        ["evaluate", "text"],
        ["sample", "run", "--temperature", "-1"],
        ["checkpoint", "export", "run", "--step", "5"],
        ["checkpoint", "prune", "run", "--keep", "0"],
        ["checkpoint", "verify", "text"],
    ],
    ids=lambda words: " ".join(words[:1] + [word for word in words[1:] if word not in small()])[:60],
)
def test_a_refused_command_writes_nothing(
    place: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    before = files(place)
    assert run_command(words) in (1, 2)
    assert "  fix: " in capsys.readouterr().err
    after = files(place)
    prepared = {name for name in after.keys() - before.keys() if name.startswith(("data/", "data2"))}
    assert {name: content for name, content in after.items() if name not in prepared} == before
    for name in prepared:  # text that was tokenized before the rest was refused need not be tokenized again
        if (place / name).parent == place / "data":
            shutil.rmtree(place / name)


def test_a_model_that_cannot_be_made_leaves_no_run_behind(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    before = files(place)
    with pytest.raises(RuntimeError, match="a mistake of the user"):
        run_command(["train", *small(*RUN, "new", "--model", f"{__name__}:broken")])
    assert files(place) == before
