"""The command line: parse, one call, print. Nothing slow is imported before a command needs it.

Exit codes: 0 done, 1 the user's to mend, 2 the command line itself is wrong, 3 the run failed, 75 stopped by a signal
with everything saved (start the same command again to go on), 130 interrupted before that.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Dict

from drumline.cli.bench import bench
from drumline.cli.checkpoint import checkpoint
from drumline.cli.doctor import check_first, doctor
from drumline.cli.jobs import add_jobs
from drumline.cli.launch import add_ssh, launch
from drumline.config import (
    PRESETS,
    BatchConfig,
    DataConfig,
    Device,
    ModelSettings,
    OnError,
    OptimConfig,
    RanksConfig,
    RecordConfig,
    RunConfig,
    TrainConfig,
    read_settings,
)
from drumline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, DrumlineError
from drumline.launch import flag
from drumline.signals import end_at_once, raise_interrupts

_DEFAULTS = TrainConfig()
_PROCESS = SimpleNamespace(is_ours=False)
"""Whether this process is the `drumline` command and nothing else, so that it can be forked and ended at any time."""

app = App(
    name="drumline",
    help="Train GPT-class language models: from raw text to a model that writes, with one command.",
    help_format="plaintext",
    # Flags are shown as the settings are called; --batch-size is understood as --batch_size.
    default_parameter=Parameter(name_transform=lambda name: name, negative_iterable=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command(checkpoint)
app.command(bench)
app.command(doctor)
app.command(launch)
for add in (add_ssh, add_jobs):
    add(launch, check=lambda words: app.parse_args(list(words), exit_on_error=False, print_error=False))


@app.command
def prepare(
    source: str,
    /,
    *,
    out: Path,
    field: str = "text",
    on_error: OnError = "stop",
    tokenizer: Path | None = None,
    vocab_size: int = 32768,
    valid: str | None = None,
    valid_fraction: float = 0.02,
) -> int:
    """Turn text into token files that train.bin readers (nanoGPT's too) understand.

    Parameters
    ----------
    source
        File, folder, glob, Hugging Face name, package.module:name, or builtin.
    out
        The folder to write: train.bin, valid.bin, tokenizer.json, manifest.json.
    field
        The field of .jsonl, .json and .parquet rows that holds the text.
    on_error
        Unreadable text: stop at the first, or skip, count and report.
    tokenizer
        A tokenizer.json to use. Default: one is trained on the text.
    vocab_size
        Size of the vocabulary to train.
    valid
        Text to hold out. Default: the source's own validation split, or valid_fraction of the documents.
    valid_fraction
        Share of the documents held out when there is no validation data.
    """
    from drumline.data import Corpus, Recipe, Tokenizer
    from drumline.data import prepare as prepare_tokens
    from drumline.report import prepared_lines, preparing

    corpus = Corpus(source, field, on_error, valid, valid_fraction)
    recipe = Recipe(corpus, Tokenizer.load(tokenizer) if tokenizer else None, vocab_size)
    with preparing() as progress:
        made = prepare_tokens(recipe, out, progress=progress)
    for line in prepared_lines(made):
        print(line)
    print(f"next:\n  drumline train --train_data_path {out}")
    return 0


@app.command(
    help_epilogue="Presets: " + ", ".join(PRESETS) + ". Every setting can stand in a TOML file: --config run.toml"
)
def train(
    *,
    model: Annotated[ModelSettings, Parameter(name="*", group=Group("Model", sort_key=1))] = _DEFAULTS.model,
    data: Annotated[DataConfig, Parameter(name="*", group=Group("Data", sort_key=2))] = _DEFAULTS.data,
    batch: Annotated[BatchConfig, Parameter(name="*", group=Group("Batch", sort_key=3))] = _DEFAULTS.batch,
    optim: Annotated[OptimConfig, Parameter(name="*", group=Group("Optimizer", sort_key=4))] = _DEFAULTS.optim,
    run: Annotated[RunConfig, Parameter(name="*", group=Group("Run", sort_key=5))] = _DEFAULTS.run,
    ranks: Annotated[RanksConfig, Parameter(name="*", group=Group("Ranks", sort_key=6))] = _DEFAULTS.ranks,
    records: Annotated[RecordConfig, Parameter(name="*", group=Group("Records", sort_key=7))] = _DEFAULTS.records,
    config: Path | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train a model; with no arguments, a small GPT on the source of Python's standard library.

    Parameters
    ----------
    config
        A TOML file with settings; flags override it.
    dry_run
        Show the resolved config, parameters, memory, tokens and steps, and start nothing.
    """
    settings = TrainConfig(model=model, data=data, batch=batch, optim=optim, run=run, ranks=ranks, records=records)
    if dry_run:
        from drumline.bench import describe

        print(describe(settings))
        return 0
    # Torch reads it when it is loaded. Its warnings about stores say only what the supervisor says better.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if ranks.nproc and "RANK" not in os.environ:
        from drumline.elastic import start_server

        start_server(ranks.nproc, early=_PROCESS.is_ours)
    from drumline.elastic import launch_training, ranks_to_start, train_here

    nproc = ranks_to_start(settings)
    check_first(settings, ranks=nproc)
    if nproc:
        return launch_training(settings, nproc=nproc)
    raise_interrupts()
    return train_here(settings)


@app.command
def evaluate(
    run: Path,
    /,
    *,
    data: str | None = None,
    split: Literal["train", "valid"] = "valid",
    batch_size: int = 8,
    device: Device = "auto",
) -> int:
    """Held-out loss, perplexity and bits per byte of a run's newest checkpoint, over all of its held-out text.

    Parameters
    ----------
    run
        A run folder, or one of its checkpoints.
    data
        Other tokens to judge by: a folder or .bin made with the run's tokenizer. Default: the run's own.
    split
        Which part of a folder of tokens: train or valid.
    batch_size
        Sequences computed at once.
    device
        auto: CUDA, then MPS, then the CPU.
    """
    from drumline.generate import evaluate_run

    step, found = evaluate_run(run, data=data, split=split, batch_size=batch_size, device=device)
    print(f"{run} at step {step:,}, over {found.tokens:,} tokens:")
    print(f"  loss           {found.loss:.4f} nats per token")
    print(f"  perplexity     {found.perplexity:,.2f}")
    print(
        f"  bits per byte  {found.bits_per_byte:.4f}"
        if found.bits_per_byte
        else "  bits per byte  not known for this file"
    )
    return 0


@app.command
def sample(
    run: Path,
    /,
    *,
    prompt: str = "",
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    max_tokens: int = 200,
    device: Device = "auto",
) -> int:
    """Let a run's newest checkpoint write, shown as it is made.

    Parameters
    ----------
    run
        A run folder, or one of its checkpoints.
    prompt
        What to continue. Default: a new document.
    temperature
        0 always takes the likeliest token; 1 samples as the model was trained.
    top_k
        Only the k likeliest tokens.
    top_p
        Only the likeliest tokens that together reach this probability.
    seed
        The same seed gives the same text.
    max_tokens
        Stop after this many.
    device
        auto: CUDA, then MPS, then the CPU.
    """
    from drumline.generate import SampleConfig, sample_run

    settings = SampleConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens)
    for piece in sample_run(run, prompt, settings, device=device):
        print(piece, end="", flush=True)
    print()
    return 0


@app.command
def runs(where: Path = Path("runs"), /) -> int:
    """List runs with their state and last losses.

    Parameters
    ----------
    where
        The folder that holds them.
    """
    from drumline.report import list_runs, print_runs

    print_runs(list(list_runs(where)), where)
    return 0


@app.command
def drill(
    *,
    faults: str = "kill,crash,stop,term,disk,corrupt,nan,host",
    minutes: float = 2.0,
    ranks: int = 2,
    seed: int = 0,
    folder: Path = Path("runs/drill"),
) -> int:
    """Break a small run on purpose, again and again, and prove that nothing was lost.

    Parameters
    ----------
    faults
        Which: ranks killed, crashed or stopped (frozen), the run asked to stop (term), a full disk, a damaged
        checkpoint (corrupt), a loss that is not finite (nan), a host that dies and comes back.
    minutes
        How long, beside the undisturbed run before it.
    ranks
        Processes to train with.
    seed
        The same seed breaks the same things.
    folder
        Where the drill keeps its runs; its drill.json has the figures.
    """
    from drumline.drill import COLUMNS, DrillConfig, conclusion, fault_rows, parse_faults, run_drill
    from drumline.report import print_table

    config = DrillConfig(faults=parse_faults(faults), minutes=minutes, ranks=ranks, seed=seed, folder=folder)
    report = run_drill(config, say=lambda text: print(text, flush=True))
    print_table(COLUMNS, fault_rows(report))
    print("\n".join(conclusion(report)))
    return 0 if report.held else EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> None:
    """The `drumline` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    _PROCESS.is_ours = argv is None
    _open_what_is_closed()
    if words[:1] == ["train"] and not {"RANK", "SLURM_PROCID"} & set(os.environ):
        # Until the loop or the supervisor takes over there is nothing to save: a run that is told to stop just ends.
        # A rank dies of these signals instead: while it waits for others it would not come to see them.
        end_at_once()
    code = run_command(words)
    uses_gloo = os.environ.get("WORLD_SIZE", "1") != "1" or words[:1] == ["doctor"]
    if "torch" not in sys.modules or not (_PROCESS.is_ours or uses_gloo):
        sys.exit(code)
    # All is saved and said. Taking an interpreter with torch apart takes a third of a second, and under gloo's threads
    # now and then aborts a process that has done its work: an elastic launcher would then repeat a run that has ended.
    if not uses_gloo:
        atexit._run_exitfuncs()
    from drumline.report import flush_console

    flush_console()
    os._exit(code)


def _open_what_is_closed() -> None:
    """Some start programs without standard streams; the next file that is opened must not take the place of one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def run_command(argv: list[str]) -> int:
    """Run one command line and give its exit code."""
    if argv and argv[0].startswith(("--local-rank", "--local_rank")):
        argv = argv[1:]  # torch.distributed.launch puts it first; the environment says the same
    try:
        app.config = [Dict(settings, source=str(path), use_commands_as_keys=False) for path, settings in _layers(argv)]
        code: int | None = app(argv, exit_on_error=False, print_error=False)
        return code or 0
    except CycloptsError as error:
        return _complain(DrumlineError(str(error), fix="see drumline --help, or drumline COMMAND --help"), EXIT_USAGE)
    except DrumlineError as error:
        return _complain(error, error.exit_code)
    except KeyboardInterrupt:
        return _complain(DrumlineError("interrupted", fix="start the same command again"), EXIT_INTERRUPTED)
    finally:
        app.config = []


def _layers(argv: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    """Config files behind the flags, the strongest first: --config, then what the run that goes on was started with."""
    if argv[:1] != ["train"]:
        return []
    from drumline.files import RunFolder

    layers = []
    config = flag(argv, "config")
    if config:
        layers.append((Path(config), read_settings(Path(config))))
    run_dir = flag(argv, "run_dir") or (layers[0][1].get("run_dir") if layers else None)
    resume_from = flag(argv, "resume_from")
    stored = RunFolder(Path(run_dir)).config if run_dir else None
    if (stored is None or not stored.exists()) and resume_from not in (None, "auto"):
        # A new run that starts from another one's checkpoint: RUN, or RUN/checkpoints/step-N.
        stored = RunFolder.named_by(Path(str(resume_from))).config
    if stored is not None and stored.exists():
        settings = read_settings(stored)
        settings.pop("run_dir", None)  # the flag, if there is one, says the same or names a new run
        layers.append((stored, settings))
    return layers


def _complain(error: DrumlineError, code: int) -> int:
    from drumline.elastic import is_to_tell
    from drumline.report import tell

    if is_to_tell():
        tell(error)
    return code
