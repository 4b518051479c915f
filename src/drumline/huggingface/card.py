"""README.md of an exported model: the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline import __version__
from drumline.config import TrainConfig
from drumline.files import RunFolder, origin
from drumline.report import last_records

_LOSSES = {"loss": "training loss", "valid_loss": "validation loss", "bits_per_byte": "validation bits per byte"}


def write_card(
    path: Path,
    *,
    name: str,
    architecture: str,
    run: RunFolder,
    config: TrainConfig,
    step: int,
    parameters: int,
    license: str,
    sha256s: Mapping[str, str],
    needs_code: bool,
) -> None:
    """Data, settings, losses, versions and hashes of a model."""
    front = ["---", f"license: {json.dumps(license)}", "library_name: transformers", "pipeline_tag: text-generation"]
    front += ["tags:", "- drumline"]
    base = config.model.init_from
    front += [f"base_model: {json.dumps(base)}"] if base and not Path(base).exists() else []
    trust = ", trust_remote_code=True" if needs_code else ""
    parts = [
        "\n".join([*front, "---", ""]),
        f"# {name}\n\nA {architecture} with {parameters:,} parameters, trained with drumline {__version__} for "
        f"{step:,} steps{f', from the weights of {base}' if base else ''}.\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})\n'
        'ids = tokenizer("Once upon a time", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))\n```\n",
        f"## Data\n\n{_table(_data(run, config))}",
        f"## Results\n\n{_table(_losses(run, step))}",
        f"## Settings\n\n{_table(_settings(config))}",
        f"## Weights\n\n{_table(sha256s, 'file', 'sha256')}",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def _data(run: RunFolder, config: TrainConfig) -> dict[str, Any]:
    about = origin(run)
    facts = {"training data": config.data.train_data_path, "validation data": config.data.valid_data_path}
    facts |= {key: about.get(key) for key in ("tokens", "text_bytes", "sha256")}
    return {name: value for name, value in facts.items() if value is not None}


def _losses(run: RunFolder, step: int) -> dict[str, Any]:
    """The last of each until the step of the checkpoint."""
    rows: dict[str, Any] = {"step": f"{step:,}"}
    for key, (at, value) in last_records(run, *_LOSSES, step=step).items():
        rows[_LOSSES[key]] = f"{value:.4f}" + ("" if at == step else f" (at step {at:,})")
    return rows


def _settings(config: TrainConfig) -> dict[str, Any]:
    chosen = {**asdict(config.model), **asdict(config.batch), **asdict(config.optim), "seed": config.run.seed}
    return {name: value for name, value in chosen.items() if value not in (None, ())}


def _table(rows: Mapping[str, Any], *heads: str) -> str:
    first, second = heads or ("", "")
    lines = [f"| {first} | {second} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {_cell(value)} |" for name, value in rows.items())]) + "\n"


def _cell(value: Any) -> str:
    return str(value).replace("\n", " ").replace("|", "\\|")
