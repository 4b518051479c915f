"""`drumline runs`, `watch`, `report`, `export` and `import`: runs for readers, and for and from other programs."""

from __future__ import annotations

import json as json_format
import re
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from drumline.errors import ConfigError, UsageError
from drumline.units import count

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def runs(
    where: Path = Path("runs"),
    /,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    watch: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """List runs with their state, latest losses, and the share of time that saves and snapshots held them up.

    Parameters
    ----------
    where
        Folder that contains the runs.
    json
        Print JSON.
    watch
        Keep the list up to date until no run is running any more.
    """
    from drumline.report import follow_runs, list_runs, print_runs

    if not where.is_dir() and where != Path("runs"):  # without any run, there is no folder of runs yet
        problem = "is not a folder" if where.exists() else "does not exist"
        raise ConfigError(f"{where} {problem}", fix="give the folder that contains the runs; default: runs")
    if watch and json:
        raise ConfigError("--watch and --json cannot be combined", fix="follow metrics.jsonl of a run instead")
    if watch:
        follow_runs(lambda: list(list_runs(where)), where)
        return 0
    rows = list(list_runs(where))
    if json:
        print(json_format.dumps(rows, indent=2))
    else:
        print_runs(rows, where)
    return 0


def watch(where: Path = Path("runs"), /, *, host: str = "127.0.0.1", port: int | None = None) -> int:
    """Serve a page of a run, or of all runs in a folder, and keep it up to date.

    Reads nothing but run folders: also those that are finished, lost or copied
    from another machine.

    Parameters
    ----------
    where
        Run folder, or folder that contains runs.
    host
        Address to listen at. At any but a loopback address, the page needs the token in the address that is printed.
    port
        Port to listen at; 0: any that is free. Default: the first free one from 6240 on.
    """
    from drumline.watch import WatchConfig, serve_page

    if not where.exists() and where != Path("runs"):  # without any run, there is no folder of runs yet
        raise ConfigError(f"{where} does not exist", fix="give a run folder, or the folder that contains the runs")
    serve_page(where, WatchConfig(host=host, port=port), say=lambda line: print(line, flush=True))
    return 0


def report(
    run: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    format: Literal["html", "png"] = "html",
) -> int:
    """Write one file about a run: curves, config, events, samples, and how to make it again.

    Parameters
    ----------
    run
        Run folder.
    out
        File to write. Default: report.html or report.png in the run folder.
    format
        html: a page that needs no network. png: the curves.
    """
    from drumline.watch import write_png, write_report

    written = write_png(run, out) if format == "png" else write_report(run, out)
    print(f"wrote {written}")
    return 0


def export(
    run: Path | None = None,
    /,
    *,
    to: Literal["hf"] = "hf",
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    shard_size: str = "5GB",
    license: str = "unknown",
    list_: Annotated[bool, Parameter(name="--list", negative=())] = False,
) -> int:
    """Export a run as a Hugging Face model, or list which settings are which class.

    Writes weights, configs, the tokenizer and a model card; loads them with
    transformers, if that is installed, and compares logits with its own.

    Parameters
    ----------
    run
        Run folder, one of its checkpoints, or a .pt file.
    to
        hf: Hugging Face.
    out
        Output folder, which must not exist.
    dtype
        Of the weights. auto: that of the model that the run began from, or float32.
    shard_size
        Largest size of a file of weights, such as 5GB or 500MB.
    license
        License of the model, for its card, such as apache-2.0.
    list_
        List the classes, and the settings of models that they compute.
    """
    if list_:
        return _print_classes()
    if run is None or out is None:
        raise UsageError("drumline export needs a run and an output folder", fix="drumline export RUN -o FOLDER")
    shard_bytes = _bytes(shard_size)
    from drumline.huggingface import export_run
    from drumline.report import print_line, to_stderr

    made = export_run(run, out, dtype=None if dtype == "auto" else dtype, shard_bytes=shard_bytes, license=license)
    for warning in made.warnings:
        to_stderr(f"warning: {warning}")
    files = f" in {made.files} files" if made.files > 1 else ""
    size = f"{count(made.bytes)}B of {made.dtype}{files}"
    print_line(f"wrote {made.folder}: {made.architecture}, step {made.step:,}, {size}")
    if made.difference is None:
        print_line(
            "transformers is not installed, so logits were not compared: pip install 'drumline[hf]', and export again"
        )
    else:
        print_line(f"logits compared with transformers on {made.compared}: largest difference {made.difference:.2g}")
    return 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise UsageError(f"--shard_size {text!r} is no size", fix="write it as 5GB, or 500MB")
    return size


def _print_classes() -> int:
    from drumline.config import PRESETS, ModelSettings, TrainConfig, with_preset
    from drumline.huggingface import FAMILIES, export_note
    from drumline.report import print_line

    for family in FAMILIES:
        needs = {**family.needs, "activation": " or ".join(family.activations)}
        print_line(f"{family.name}: {', '.join(f'{name} {value}' for name, value in needs.items())}")
    print_line(
        "Settings that are not named may have any value. Other models: DrumlineForCausalLM, with a file of its own."
    )
    for recipe in ("classic", "modern", "portable"):
        of_recipe: dict[str, list[str]] = {}
        for name in PRESETS:
            model = with_preset(TrainConfig(model=ModelSettings(preset=name, recipe=recipe))).model
            of_recipe.setdefault(export_note(model), []).append(name)
        for note, names in of_recipe.items():
            print_line(f"--recipe {recipe}: {', '.join(names)}: {note}")
    return 0


def import_(model: str, /, *, out: Annotated[Path, Parameter(alias="-o")]) -> int:
    """Make a run of a Hugging Face model, or of nanoGPT's ckpt.pt, without training.

    Parameters
    ----------
    model
        Folder with config.json and safetensors, Hugging Face name, or ckpt.pt of nanoGPT.
    out
        Run folder, which must not exist.
    """
    from drumline.huggingface import import_model
    from drumline.report import command, print_line

    source, run = import_model(model, out)
    print_line(f"wrote {run.path}: {source.family.name}, vocabulary {source.config.vocab_size:,}")
    next_steps = [command("train", "--run_dir", run.path, "--train_data_path", "TEXT")]
    if run.tokenizer.exists():
        next_steps.insert(0, command("sample", run.path))
    print_line("\n  ".join(["next:", *next_steps]))
    return 0
