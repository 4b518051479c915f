"""Every setting of a training run, with its default and its meaning. No torch here: `--help` must answer at once."""

from __future__ import annotations

import math
import os
import re
from dataclasses import asdict, dataclass
from typing import Literal

from drumline.config.facts import check, check_positive, setting
from drumline.config.model import ModelSettings

OPTIMIZERS = ("adamw", "muon")
OnError = Literal["stop", "skip"]
DataDtype = Literal["auto", "uint16", "uint32", "int32", "int64"]
Schedule = Literal["cosine", "wsd", "constant"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
OnNonfinite = Literal["skip", "rollback", "halt"]
Backend = Literal["auto", "nccl", "gloo"]
ScaleLr = Literal["none", "linear", "sqrt"]
RENDEZVOUS_PORT = 29400
"""The rendezvous port, unless an endpoint says otherwise."""
SHORT_PARTS = 4
"""Number of short sequences per sequence at the start of a run, with short_contexts."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on. Text is tokenized once and cached; token files are read as they are."""

    train_data_path: str = setting("builtin", may_change=True, per_host=True)
    """Tokens (.bin, prepared folder or URL, mix books:0.7,code:0.3) or text (path, Hugging Face name, module:name)."""
    valid_data_path: str | None = setting(None, may_change=True, per_host=True)
    """Validation data, of the same kinds. Default: the source's validation split, or valid_fraction of the text."""
    stages: tuple[str, ...] = ()
    """Other weights of a mix, between two steps: '1000-2000 books:0.5,code:0.5', or '80%- code:1'. May be repeated."""
    data_dtype: DataDtype = setting("auto", may_change=True)
    """Integers in .bin files of other trainers. auto: from their header, else uint16, if they look like it."""
    valid_fraction: float = setting(0.02, may_change=True)
    """Fraction of the documents to hold out if there is no validation data."""
    format: Literal["text", "chat"] = "text"
    """text, or chat: rows of messages (role and content), with the loss over the assistant's tokens only."""
    field: str = setting("text", may_change=True)
    """Field of .jsonl, .json and .parquet rows that contains the text. Default with --format chat: messages."""
    on_error: OnError = setting("stop", may_change=True)
    """Unreadable text: stop at the first error, or skip it and report how much was skipped."""
    tokenizer: str | None = setting(None, may_change=True, per_host=True)
    """Path of a tokenizer.json. Default: train one on the text."""
    vocab_size: int | None = None
    """Vocabulary size of a newly trained tokenizer. Default: the preset's."""
    data_dir: str = setting("data", may_change=True, per_host=True)
    """Folder for tokenized text, reused by later runs."""
    cache_dir: str | None = setting(None, may_change=True, per_host=True)
    """Folder for what is read of tokens in an object store (s3://bucket/tokens). Default: cache in data_dir."""
    cache_gb: float = setting(20.0, may_change=True, per_host=True)
    """Gigabytes of tokens from object stores to keep there; what was used least recently is removed."""
    document_mask: bool = False
    """Mask attention between documents in the same sequence."""
    packing: Literal["stream", "best_fit"] = "stream"
    """stream: documents one after another, cut where a sequence ends; best_fit: sequences of whole documents."""
    skip_list: str | None = setting(None, per_host=True)
    """File of documents that are not trained on, written by `drumline blame --exclude`. Validation still has them."""


def is_mix(path: str) -> bool:
    """Whether a setting for data is several folders with their amounts: books:0.7,code:2epochs."""
    return not os.path.exists(path) and bool(re.search(r":\s*[-+.]?\d[\d.e+-]*(epochs?|\w?tokens?)?\s*(,|$)", path))


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch size and length of a run. Sequences per step = batch_size x ranks x gradient_accumulation_steps."""

    batch_size: int | None = None
    """Sequences per micro-batch on each rank. Default: the preset's."""
    gradient_accumulation_steps: int | None = setting(None, may_change=True)
    """Micro-batches per rank and optimizer step. Default: 1."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks, instead of gradient_accumulation_steps. Fixed when a run starts."""
    total_steps: int | None = None
    """Number of optimizer steps. Default: the preset's, or one epoch."""
    epochs: float | None = None
    """Number of passes over the training data, instead of total_steps."""
    minutes: float | None = None
    """Train for about this many minutes, instead of total_steps. A resumed run keeps its number of steps."""
    short_contexts: float | None = None
    """Initial fraction of the run that splits each sequence into four short ones. Default: the recipe's."""

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "gradient_accumulation_steps", "global_batch_size", "total_steps")
        check(
            self,
            epochs=self.epochs is None or 0.0 < self.epochs < math.inf,
            minutes=self.minutes is None or 0.0 < self.minutes < math.inf,
            short_contexts=self.short_contexts is None or 0.0 <= self.short_contexts <= 1.0,
        )
        lengths = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        if len(lengths) > 1:
            from drumline.config.ranges import refuse_lengths

            refuse_lengths(lengths, LENGTHS)


LENGTHS = ("total_steps", "epochs", "minutes")
"""Settings for the length of a run, of which at most one is given."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and the learning rate schedule."""

    optimizer: str | None = None
    """adamw, muon (AdamW for non-matrices), or package.module:name of a function. Default: the recipe's."""
    lr: float | None = None
    """Peak learning rate; with Muon, that of the matrices. Default: the preset's, for the optimizer in use."""
    embedding_lr: float | None = None
    """Peak learning rate of the embeddings. Default: the recipe's, or lr."""
    head_lr: float | None = None
    """Peak learning rate of the output head, norms and biases. Default: the recipe's, or lr."""
    scale_lr: ScaleLr = "none"
    """Scale the learning rates by global batch size / base_batch_size (linear), or by its square root (sqrt)."""
    base_batch_size: int | None = None
    """Global batch size that lr was tuned for, with scale_lr."""
    schedule: Schedule | None = None
    """Schedule after warmup: cosine decay, warmup-stable-decay (wsd), or constant. Default: the recipe's."""
    warmup_steps: int | None = None
    """Steps of linear warmup. Default: the recipe's, or 2% of the run."""
    min_lr_ratio: float | None = None
    """Final learning rate of cosine and wsd, as a fraction of the peak. Default: the recipe's."""
    decay_fraction: float | None = None
    """Fraction of the run that wsd spends decaying. Default: the recipe's."""
    weight_decay: float | None = None
    """Weight decay, not applied to norms and biases. Default: the recipe's."""
    momentum: float | None = None
    """Muon momentum, reached after a warmup from 0.85 over 100 steps. Default: the recipe's."""
    beta1: float | None = None
    """AdamW beta1. Default: the recipe's."""
    beta2: float | None = None
    """AdamW beta2. Default: the recipe's."""
    eps: float | None = None
    """AdamW epsilon. Default: the recipe's."""
    grad_clip: float | None = None
    """Maximum gradient norm; 0 disables clipping. Default: the recipe's."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        above_0 = given.keys() & {"lr", "embedding_lr", "head_lr", "base_batch_size", "decay_fraction"}
        below_1 = given.keys() & {"momentum", "beta1", "beta2"}
        at_most_1 = given.keys() & {"min_lr_ratio", "decay_fraction"}
        check(self, **{name: 0.0 <= value < math.inf for name, value in given.items()})
        check(self, **{name: given[name] > 0.0 for name in above_0})
        check(self, **{name: given[name] < 1.0 for name in below_1}, **{n: given[n] <= 1.0 for n in at_most_1})
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            from drumline.plugins import check_form

            check_form("optimizer", self.optimizer, known=OPTIMIZERS)
        if (self.scale_lr == "none") != (self.base_batch_size is None):
            from drumline.config.ranges import refuse_scale

            refuse_scale(self.scale_lr, self.base_batch_size)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run folder, device and precision, evaluation, checkpoints, and what to do about bad steps."""

    run_dir: str | None = setting(None, may_change=True, per_host=True)
    """Run folder. Default: runs/PRESET, numbered if it exists. A run that exists is resumed."""
    resume_from: str = setting("auto", may_change=True, per_host=True)
    """auto: resume from the run's newest valid checkpoint; or a step, or a path: checkpoint, run folder, .pt file."""
    allow_change: tuple[str, ...] = setting((), may_change=True)
    """Name of a setting that may differ from the stored config when a run is resumed. May be repeated."""
    seed: int = 0
    """Random seed for data order, initial weights and dropout."""
    device: Device = setting("auto", may_change=True, per_host=True)
    """auto: CUDA, then MPS, then the CPU."""
    dtype: Dtype = "auto"
    """Autocast dtype; weights stay float32. auto: bfloat16 on GPUs that support it, else float32."""
    compile: bool = setting(False, may_change=True)
    """Compile the model with torch.compile: slower start, faster steps."""
    activation_checkpointing: Literal["none", "block", "selective"] = setting("none", may_change=True)
    """Compute activations again in backward to save memory: all of each block, or (selective) all but its products."""
    offload: Literal["none", "optimizer"] = setting("none", may_change=True)
    """optimizer: with --shard, keep and update float32 weights, gradients and optimizer state in host memory."""
    fp8: bool = False
    """Train feed-forward layers and output head in float8, the rest in bfloat16. Needs a Hopper GPU (H100, H200)."""
    eval_every: int | None = setting(None, may_change=True)
    """Steps between evaluations. Default: a tenth of the run."""
    eval_windows: int = setting(128, may_change=True)
    """Validation sequences per evaluation during training; `drumline evaluate` uses all of them."""
    eval_tasks: str | None = setting(None, may_change=True)
    """builtin: also measure tasks made from the validation data at each evaluation. Default: none."""
    save_every: int | None = setting(None, may_change=True)
    """Steps between checkpoints. Default: a tenth of the run."""
    snapshot_every: int | Literal["auto"] = setting("auto", may_change=True)
    """Steps between in-memory checkpoints (/dev/shm) for restarts after a crash; 0: none. auto: for 1% of the time."""
    snapshot_copies: int = setting(1, may_change=True)
    """With --shard on several hosts: how many of them have each shard of a snapshot. 2: a lost host costs no more."""
    keep_checkpoints: int = setting(3, may_change=True)
    """Number of checkpoints to keep."""
    keep_every: int | None = setting(None, may_change=True)
    """Also keep every checkpoint whose step is a multiple of this."""
    keep_best: bool = setting(True, may_change=True)
    """Also keep the checkpoint with the lowest validation loss."""
    checkpoint_store: str | None = setting(None, may_change=True)
    """URL in an object store, as s3://bucket/run: checkpoints are uploaded there, and a new machine resumes from it."""
    on_nonfinite: OnNonfinite = setting("skip", may_change=True)
    """If a recomputed step still has NaN or Inf: skip the update, roll back to a checkpoint, or halt the run."""
    max_nonfinite: int = setting(5, may_change=True)
    """Number of consecutive steps with NaN or Inf before the run fails."""
    spike_factor: float | None = setting(None, may_change=True)
    """Roll back when the loss exceeds this many times the median of recent steps. Default: never."""
    max_rollbacks: int = setting(5, may_change=True)
    """Number of times a run may roll back to a checkpoint and skip the data that caused it."""
    check_replicas_every: int | None = setting(None, may_change=True)
    """Steps between checks that all ranks hold the same weights. Default: before each checkpoint."""
    doctor: Literal["quick", "off"] = setting("quick", may_change=True, per_host=True)
    """Check this machine before the run: quick, or off."""

    def __post_init__(self) -> None:
        check_positive(self, "eval_every", "eval_windows", "save_every", "keep_checkpoints", "keep_every")
        check_positive(self, "max_nonfinite", "check_replicas_every", "snapshot_copies")
        check(
            self,
            snapshot_every=self.snapshot_every == "auto" or self.snapshot_every >= 0,
            spike_factor=self.spike_factor is None or 1.0 < self.spike_factor < math.inf,
            max_rollbacks=self.max_rollbacks >= 0,
        )


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The processes that train together. None of these settings changes what the run computes."""

    nproc: int | None = setting(None, may_change=True, per_host=True)
    """Number of ranks to start on this machine. Default: one per GPU. Not needed under torchrun or srun."""
    backend: Backend = setting("auto", may_change=True)
    """torch.distributed backend. auto: nccl on GPUs, gloo on CPUs."""
    bitwise: bool = False
    """Sum gradients in a fixed order: bitwise identical results on any number of ranks."""
    shard: int | Literal["none", "full", "host"] = setting("none", may_change=True)
    """Spread weights, gradients and optimizer state over all ranks (full), those of each host, or groups of so many."""
    max_restarts: int | None = setting(None, may_change=True)
    """Number of restarts after a rank dies or hangs; 0: none. Default: unlimited while the run makes progress."""
    hang_timeout: float | None = setting(None, may_change=True)
    """Seconds without progress until a rank is hung; x 10 while saving. Default: 20 median steps, at least 60."""
    nnodes: str = setting("1", may_change=True)
    """Number of hosts, as 2; or a range, as 1:4, for an elastic run. Start the same command on each host."""
    rdzv_endpoint: str | None = setting(None, may_change=True)
    """HOST:PORT for the rendezvous. Default: hosts find each other through --run_dir on a shared disk."""

    def __post_init__(self) -> None:
        check_positive(self, "nproc")
        check(
            self,
            max_restarts=self.max_restarts is None or self.max_restarts >= 0,
            hang_timeout=self.hang_timeout is None or self.hang_timeout > 0,
            nnodes=1 <= self.hosts[0] <= self.hosts[1],
        )

    @property
    def hosts(self) -> tuple[int, int]:
        """The minimum and maximum number of hosts; (0, 0) if nnodes is not a valid number or range."""
        fewest, _, most = self.nnodes.partition(":")
        return (int(fewest), int(most or fewest)) if fewest.isdigit() and (most or fewest).isdigit() else (0, 0)


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Logging and tracking. metrics.jsonl and train.log are always written."""

    log_every: int = setting(10, may_change=True)
    """Steps between log lines."""
    sample_prompt: str = setting("", may_change=True)
    """Prompt for the text sample at the end of training."""
    tensorboard: bool = setting(False, may_change=True)
    """Write TensorBoard files into the run folder."""
    use_wandb: bool = setting(False, may_change=True)
    """Log to Weights & Biases; offline if it cannot be reached."""
    wandb_project: str = setting("drumline", may_change=True)
    """Weights & Biases project."""
    wandb_run_name: str | None = setting(None, may_change=True)
    """Weights & Biases run name. Default: the name of the run folder."""
    sink: str | None = setting(None, may_change=True)
    """package.module:name of a function that takes the run folder and returns an object with write(record), close()."""

    def __post_init__(self) -> None:
        check_positive(self, "log_every")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The whole config: one section of run.toml per field. Names of settings are unique across sections."""

    model: ModelSettings = ModelSettings()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    ranks: RanksConfig = RanksConfig()
    records: RecordConfig = RecordConfig()
