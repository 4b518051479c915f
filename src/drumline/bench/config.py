"""The settings of `drumline bench`, and the training config that they correspond to. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drumline.config import (
    PRESETS,
    Backend,
    BatchConfig,
    Device,
    Dtype,
    ModelSettings,
    RanksConfig,
    RunConfig,
    TrainConfig,
    preset,
    with_preset,
)
from drumline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure. Settings that `drumline train` has too mean the same here."""

    preset: str | None = None
    """Model preset. Default: modern on a GPU, modern-tiny on a CPU."""
    batch_size: int | None = None
    """Sequences per micro-batch. Default: the preset's."""
    global_batch_size: int | None = None
    """Sequences per step over all ranks. Default: 1 micro-batch per rank, or 16 per rank with find_batch_size."""
    find_batch_size: bool = False
    """First search for the largest micro-batch that fits in memory and divides global_batch_size."""
    steps: int | None = None
    """Number of steps to time. Default: as many as fit in 10 seconds, at most 200."""
    context: int | None = None
    """Sequence length in tokens. Default: the preset's."""
    device: Device = "auto"
    """auto: CUDA, then MPS, then the CPU."""
    dtype: Dtype = "auto"
    """Autocast dtype. auto: bfloat16 on GPUs that support it, else float32."""
    compile: bool = False
    """Compile the model with torch.compile. Compile time is not measured."""
    nproc: int | None = None
    """Number of ranks to start on this machine. Default: one per GPU. Not needed under torchrun or srun."""
    backend: Backend = "auto"
    """torch.distributed backend. auto: nccl on GPUs, gloo on CPUs."""
    table_presets: str | None = None
    """Presets in the table, as gpt2,modern; all; or none. Default: presets of the same size."""
    table_batch_sizes: str | None = None
    """Micro-batch sizes in the table, as 8,16,32. Default: half, equal to and twice batch_size."""
    json: Path | None = None
    """Write the results to this JSON file."""
    plot: Path | None = None
    """Plot the results to this PNG file."""

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("context", self.context)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", fix=f"give --{name} a value of 1 or more")
        if self.find_batch_size and self.batch_size is not None:
            raise ConfigError(
                f"batch_size {self.batch_size} is set together with find_batch_size",
                fix="drop --batch_size or --find_batch_size",
            )
        if self.preset is not None:
            preset(self.preset)
        self.presets_of_table(self.preset or "modern-tiny")
        self.batch_sizes_of_table(1)
        for flag, path in (("json", self.json), ("plot", self.plot)):
            if path is not None and not path.absolute().parent.is_dir():
                folder = path.absolute().parent
                raise ConfigError(f"--{flag} {path}: folder {folder} does not exist", fix=f"mkdir -p {folder}")
            if path is not None and path.is_dir():
                raise ConfigError(f"--{flag} {path} is a folder", fix=f"give a file, as --{flag} {path}/bench.{flag}")

    def presets_of_table(self, chosen: str) -> list[str]:
        """chosen: the preset that is benchmarked in full"""
        if self.table_presets is None:
            width = preset(chosen).shape["d_model"]
            return [name for name, other in PRESETS.items() if other.shape["d_model"] == width]
        if self.table_presets in ("all", "none"):
            return list(PRESETS) if self.table_presets == "all" else []
        names = [name.strip() for name in self.table_presets.split(",")]
        for name in names:
            preset(name)
        return names

    def batch_sizes_of_table(self, batch_size: int) -> list[int]:
        """batch_size: that of the full benchmark"""
        if self.table_batch_sizes is None:
            return sorted({max(1, batch_size // 2), batch_size, 2 * batch_size})
        words = [word.strip() for word in self.table_batch_sizes.split(",")]
        if not all(word.isdigit() and int(word) >= 1 for word in words):
            raise ConfigError(
                f"table_batch_sizes {self.table_batch_sizes!r} is not a list of positive integers",
                fix="separate them by commas: --table_batch_sizes 8,16,32",
            )
        return sorted({int(word) for word in words})

    def as_training(self, name: str) -> TrainConfig:
        """The resolved training config for preset `name`."""
        return with_preset(
            TrainConfig(
                model=ModelSettings(preset=name, context=self.context),
                batch=BatchConfig(batch_size=self.batch_size, global_batch_size=self.global_batch_size),
                run=RunConfig(device=self.device, dtype=self.dtype, compile=self.compile),
                ranks=RanksConfig(nproc=self.nproc, backend=self.backend),
            )
        )
