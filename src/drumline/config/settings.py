"""Every setting drumline has, with its default and its meaning. No torch here: `--help` must answer at once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from drumline.errors import ConfigError

Positions = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "swiglu", "relu2"]
Init = Literal["gpt2", "zero"]
Recipe = Literal["classic", "modern"]
OptimizerName = Literal["adamw", "muon"]
OnError = Literal["stop", "skip"]
Schedule = Literal["cosine", "wsd", "constant"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
OnNonfinite = Literal["skip", "rollback", "halt"]
MEETING_PORT = 29400
"""Where several hosts meet, unless an endpoint says otherwise."""
Backend = Literal["auto", "nccl", "gloo"]
ScaleLr = Literal["none", "linear", "sqrt"]


def _check(settings: object, **rules: bool) -> None:
    """Refuse the first setting whose rule does not hold."""
    for name, holds in rules.items():
        if not holds:
            value = getattr(settings, name)
            raise ConfigError(f"{name} is {value}, out of range", fix=f"see --{name} in `drumline train --help`")


def _positive(settings: object, *names: str) -> None:
    """Refuse a setting that is set and less than 1."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}", fix=f"give --{name} a value of 1 or more")


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. The defaults are GPT-2 124M; `positions`, `norm` and `activation` choose the family."""

    vocab_size: int = 50257
    """Rows of the embedding: at least the tokenizer's size."""
    max_position_embeddings: int = 1024
    """The longest sequence the model is made for, in tokens."""
    n_layers: int = 12
    """Transformer blocks."""
    n_heads: int = 12
    """Attention heads; must divide d_model."""
    d_model: int = 768
    """Width of the residual stream."""
    d_ff: int = 3072
    """Inner width of the feed-forward part."""
    dropout: float = 0.0
    """Probability of dropping an activation while training."""
    n_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); must divide n_heads. None: as many as n_heads."""
    positions: Positions = "learned"
    """How a token knows where it stands."""
    norm: Norm = "layernorm"
    """Normalisation before each part of a block and before the head."""
    activation: Activation = "gelu"
    """Nonlinearity of the feed-forward part; swiglu adds a gate (a third matrix)."""
    qk_norm: bool = False
    """Normalise queries and keys per head (RMS) before attention."""
    bias: bool = True
    """Bias terms in linear layers and LayerNorm, as GPT-2 has."""
    tie_embeddings: bool = True
    """Use the token embedding as the output matrix too."""
    init: Init = "gpt2"
    """First weights: GPT-2's, or projections (whatever writes into the residual stream) and an untied head at zero."""
    norm_weights: bool = True
    """Learned weights in norms."""
    softcap: float = 0.0
    """What no logit exceeds, approached smoothly (tanh); 0: no limit."""
    value_tables: int = 0
    """Embeddings of the token that are added to attention's values in as many of the first and last layers."""
    smear: bool = False
    """Add to each token's embedding that of the token before, times learned weights."""
    rope_theta: float = 10_000.0
    """Base wavelength of rotary positions."""

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "max_position_embeddings", "n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff")
        if self.d_model % self.n_heads:
            raise ConfigError(
                f"d_model {self.d_model} cannot be divided over {self.n_heads} heads",
                fix="choose --d_model as a multiple of --n_heads",
            )
        if self.n_heads % self.kv_heads:
            raise ConfigError(
                f"{self.n_heads} heads cannot share {self.kv_heads} key/value heads evenly",
                fix="choose --n_kv_heads as a divisor of --n_heads",
            )
        if self.positions == "rope" and self.head_width % 2:
            raise ConfigError(
                f"rotary positions need an even head width, not {self.head_width} (d_model / n_heads)",
                fix="change --d_model or --n_heads, or use --positions learned",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout {self.dropout} is not a probability below 1", fix="use --dropout 0.0 to 0.9")
        _check(self, softcap=0.0 <= self.softcap < math.inf, value_tables=self.value_tables >= 0)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model to train: a preset, and what differs from it."""

    preset: str = "modern-tiny"
    """A shape and defaults that suit it; `drumline train --help` ends with the list."""
    recipe: Recipe | None = None
    """Defaults for how it starts, what it adds to the block, its optimizer and schedule. Default: the preset's."""
    model: str = "gpt"
    """gpt, or package.module:name of a function: GPTConfig -> nn.Module."""
    context: int | None = None
    """Tokens per sequence. Default: the preset's."""
    n_layers: int | None = None
    """Transformer blocks. Default: the preset's."""
    n_heads: int | None = None
    """Attention heads. Default: the preset's."""
    n_kv_heads: int | None = None
    """Key and value heads, for grouped-query attention. Default: the preset's."""
    d_model: int | None = None
    """Width of the residual stream. Default: the preset's."""
    d_ff: int | None = None
    """Inner width of the feed-forward part. Default: the preset's."""
    dropout: float | None = None
    """Probability of dropping an activation while training. Default: the preset's."""
    positions: Positions | None = None
    """Learned position embeddings, or rotary ones. Default: the preset's."""
    norm: Norm | None = None
    """LayerNorm or RMSNorm. Default: the preset's."""
    activation: Activation | None = None
    """Nonlinearity of the feed-forward part. Default: the preset's."""
    qk_norm: bool | None = None
    """Normalise queries and keys before attention. Default: the preset's."""
    bias: bool | None = None
    """Bias terms in linear layers and LayerNorm. Default: the preset's."""
    tie_embeddings: bool | None = None
    """Use the token embedding as the output matrix too. Default: the recipe's."""
    init: Init | None = None
    """First weights: GPT-2's, or projections and an untied head at zero. Default: the recipe's."""
    norm_weights: bool | None = None
    """Learned weights in norms. Default: the recipe's."""
    softcap: float | None = None
    """What no logit exceeds, approached smoothly; 0: no limit. Default: the recipe's."""
    value_tables: int | None = None
    """Token embeddings added to attention's values, in as many first and last layers. Default: the recipe's."""
    smear: bool | None = None
    """Add to each token's embedding that of the token before, times learned weights. Default: the recipe's."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on. Text is prepared once and kept; token files are read as they are."""

    train_data_path: str = "builtin"
    """Tokens (.bin, prepared folder) or text: file, folder, glob, Hugging Face name, package.module:name, builtin."""
    valid_data_path: str | None = None
    """Held-out data, of the same kinds. Default: the source's validation split, or valid_fraction of the documents."""
    valid_fraction: float = 0.02
    """Share of the documents held out when there is no validation data."""
    field: str = "text"
    """The field of .jsonl, .json and .parquet rows that holds the text."""
    on_error: OnError = "stop"
    """Unreadable text: stop at the first, or skip, count and report."""
    tokenizer: str | None = None
    """A tokenizer.json to use. Default: one is trained on the text."""
    vocab_size: int | None = None
    """Size of the vocabulary to train. Default: the preset's."""
    data_dir: str = "data"
    """Where prepared tokens are kept for the next run."""
    document_mask: bool = False
    """Keep documents that share a sequence from attending to each other."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How much a step sees. Total = batch_size x world size x gradient_accumulation_steps, fixed when a run starts."""

    batch_size: int | None = None
    """Sequences per micro-batch: what one rank computes at once. Default: the preset's."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches each rank adds up before an update. Default: 1."""
    global_batch_size: int | None = None
    """Sequences per step over all ranks, set directly. Does not change with the number of ranks."""
    total_steps: int | None = None
    """Optimizer steps to train. Default: the preset's, or one epoch."""
    epochs: float | None = None
    """Passes over the training data, instead of total_steps."""
    short_contexts: float | None = None
    """The share of the run, from its start, that reads each sequence as four short ones. Default: the recipe's."""

    def __post_init__(self) -> None:
        _positive(self, "batch_size", "gradient_accumulation_steps", "global_batch_size", "total_steps")
        _check(self, epochs=self.epochs is None or 0.0 < self.epochs < math.inf)
        _check(self, short_contexts=self.short_contexts is None or 0.0 <= self.short_contexts <= 1.0)
        if self.total_steps is not None and self.epochs is not None:
            raise ConfigError(
                f"total_steps {self.total_steps} and epochs {self.epochs} both set the length of the run",
                fix="give --total_steps or --epochs, not both",
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rates, which are functions of the step alone."""

    optimizer: OptimizerName | None = None
    """AdamW for all weights, or Muon for the matrices and AdamW for the others. Default: the recipe's."""
    lr: float | None = None
    """Peak learning rate; with Muon, that of the matrices. Default: the preset's, for either optimizer."""
    embedding_lr: float | None = None
    """Peak learning rate of embeddings. Default: the recipe's, or lr."""
    head_lr: float | None = None
    """Peak learning rate of the output matrix, norms and biases. Default: the recipe's, or lr."""
    scale_lr: ScaleLr = "none"
    """Scale all rates with the size of a step: by global batch / base_batch_size (linear), or its square root."""
    base_batch_size: int | None = None
    """Sequences per step that lr is meant for, with scale_lr."""
    schedule: Schedule | None = None
    """After warmup: half a cosine, stable then linear decay (wsd), or constant. Default: the recipe's."""
    warmup_steps: int | None = None
    """Steps of linear warmup. Default: the recipe's, or a fiftieth of the run."""
    min_lr_ratio: float | None = None
    """Where cosine and wsd end, as a share of the peak. Default: the recipe's."""
    decay_fraction: float | None = None
    """The share of the run that wsd spends decaying. Default: the recipe's."""
    weight_decay: float | None = None
    """Decay of matrices; norms and biases are never decayed. Default: the recipe's."""
    momentum: float | None = None
    """Muon's memory of the gradient, after 100 steps of growing from 0.85. Default: the recipe's."""
    beta1: float | None = None
    """AdamW's memory of the gradient. Default: the recipe's."""
    beta2: float | None = None
    """AdamW's memory of its square. Default: the recipe's."""
    eps: float | None = None
    """AdamW's guard against division by zero. Default: the recipe's."""
    grad_clip: float | None = None
    """Largest norm of the gradient; 0 turns clipping off. Default: the recipe's."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        above_0 = given.keys() & {"lr", "embedding_lr", "head_lr", "base_batch_size", "decay_fraction"}
        below_1 = given.keys() & {"momentum", "beta1", "beta2"}
        at_most_1 = given.keys() & {"min_lr_ratio", "decay_fraction"}
        _check(self, **{name: 0.0 <= value < math.inf for name, value in given.items()})
        _check(self, **{name: given[name] > 0.0 for name in above_0})
        _check(self, **{name: given[name] < 1.0 for name in below_1}, **{n: given[n] <= 1.0 for n in at_most_1})
        if (self.scale_lr == "none") != (self.base_batch_size is None):
            raise ConfigError(
                f"scale_lr {self.scale_lr} and base_batch_size {self.base_batch_size} belong together",
                fix="give both, as --scale_lr linear --base_batch_size 32, or neither",
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives, what it runs on, and how often it looks up."""

    run_dir: str | None = None
    """The run's folder. Default: runs/PRESET, numbered when that is taken. An existing run goes on."""
    resume_from: str = "auto"
    """`auto`: the run folder's newest valid checkpoint; or a step, or the path of a checkpoint, a run or a .pt."""
    allow_change: tuple[str, ...] = ()
    """A setting that may differ from the run's own when it goes on; repeat for several."""
    seed: int = 0
    """Decides the order of the data, the first weights and every random draw."""
    device: Device = "auto"
    """auto: CUDA, then MPS, then the CPU."""
    dtype: Dtype = "auto"
    """Of the matrix products; weights stay float32. auto: bfloat16 on GPUs that have it, else float32."""
    compile: bool = False
    """Compile the model with torch.compile: slower start, faster steps."""
    fp8: bool = False
    """Train feed-forward and output head in float8, the rest in bfloat16: modern GPTs on a Hopper GPU (H100, H200)."""
    eval_every: int | None = None
    """Steps between held-out evaluations. Default: a tenth of the run."""
    eval_windows: int = 128
    """Held-out sequences per evaluation while training; `drumline evaluate` takes all."""
    save_every: int | None = None
    """Steps between checkpoints. Default: a tenth of the run."""
    snapshot_every: int | None = None
    """Steps between copies in memory (/dev/shm), to go on from after a crash; 0: none. Default: save_every / 10."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = None
    """Also keep the checkpoints of every so many steps, for good."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest held-out loss."""
    on_nonfinite: OnNonfinite = "skip"
    """A loss or gradient that is not finite, also when computed again: skip the update, go back, or end the run."""
    max_nonfinite: int = 5
    """Steps in a row with a loss or gradient that is not finite before the run ends."""
    spike_factor: float | None = None
    """A loss this many times the median of the last steps goes back to a checkpoint. Default: never."""
    max_rollbacks: int = 5
    """How often a run may go back to a checkpoint and leave out the data that led it astray."""
    check_replicas_every: int | None = None
    """Steps between comparisons of all ranks' weights. Default: before each checkpoint."""
    doctor: Literal["quick", "off"] = "quick"
    """Checks of this machine before the run: quick, or off."""

    def __post_init__(self) -> None:
        _positive(self, "eval_every", "eval_windows", "save_every", "keep_checkpoints", "keep_every", "max_nonfinite")
        _positive(self, "check_replicas_every")
        _check(
            self,
            snapshot_every=self.snapshot_every is None or self.snapshot_every >= 0,
            spike_factor=self.spike_factor is None or 1.0 < self.spike_factor < math.inf,
            max_rollbacks=self.max_rollbacks >= 0,
        )


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """How many processes train together. None of it changes what the run computes."""

    nproc: int | None = None
    """Ranks to start on this machine. Default: one per GPU; torchrun and srun bring their own."""
    backend: Backend = "auto"
    """How ranks talk: nccl between GPUs, gloo between CPUs."""
    bitwise: bool = False
    """Sum gradients in one fixed order: the same bits on any number of ranks."""
    max_restarts: int | None = None
    """How often ranks are started again after one dies or hangs. Default: as often as needed while the run makes
    progress; 0: never."""
    hang_timeout: float | None = None
    """Seconds without progress after which a rank counts as hung, ten times that while it saves or evaluates.
    Default: 20 times what a step takes, at least 60."""
    nnodes: str = "1"
    """Hosts that train together, as 2, or as 1:4 for a run that goes on while hosts come and go. Start it on each."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the host where they meet. Default: they find each other through --run_dir on a shared disk."""

    def __post_init__(self) -> None:
        _positive(self, "nproc")
        _check(
            self,
            max_restarts=self.max_restarts is None or self.max_restarts >= 0,
            hang_timeout=self.hang_timeout is None or self.hang_timeout > 0,
            nnodes=1 <= self.hosts[0] <= self.hosts[1],
        )

    @property
    def hosts(self) -> tuple[int, int]:
        """The fewest and the most hosts; (0, 0) for what is not a number of hosts."""
        fewest, _, most = self.nnodes.partition(":")
        return (int(fewest), int(most or fewest)) if fewest.isdigit() and (most or fewest).isdigit() else (0, 0)


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Who is told about the run. metrics.jsonl and train.log are always written."""

    log_every: int = 10
    """Steps between records."""
    sample_prompt: str = ""
    """What the model is asked to continue at the end of training."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folder."""
    use_wandb: bool = False
    """Also report to Weights & Biases; offline when it cannot be reached."""
    wandb_project: str = "drumline"
    """Project name there."""
    wandb_run_name: str | None = None
    """Run name there. Default: the run folder's name."""
    sink: str | None = None
    """package.module:name of a function: run folder -> object with write(record) and close()."""

    def __post_init__(self) -> None:
        _positive(self, "log_every")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All of it: one section of run.toml per field; no two sections share a setting's name."""

    model: ModelSettings = ModelSettings()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    ranks: RanksConfig = RanksConfig()
    records: RecordConfig = RecordConfig()
