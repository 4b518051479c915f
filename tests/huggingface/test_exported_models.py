"""`drumline export`: a run as a Hugging Face model, from which transformers computes the same logits."""

import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from drumline.checkpoint.commands import export_checkpoint
from drumline.cli.app import run_command
from drumline.config.model import GPTConfig
from drumline.data.tokenizer import Tokenizer
from drumline.files.disk import file_sha256
from drumline.huggingface import comparing
from drumline.huggingface.families import GPT2, Family, config_json
from drumline.huggingface.tensors import Mapped, mapped
from drumline.huggingface.weights import shards, write_shards

Train = Callable[..., int]
MODELS = {
    "GPT2LMHeadModel": "--preset tiny",
    "LlamaForCausalLM": "--preset tiny --positions rope --norm rmsnorm --activation swiglu --no-bias --n_heads 4 "
    "--n_kv_heads 2 --norm_eps 1e-5",
    "Qwen3ForCausalLM": "--recipe classic --activation swiglu --no-norm_weights --no-tie_embeddings --head_dim 12 "
    "--rope_theta 5000",
    "ArceeForCausalLM": "--preset tiny --positions rope --norm rmsnorm --activation relu2",
}


def export(*words: str) -> int:
    return run_command(["export", *words])


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_from_an_exported_run(
    name: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*MODELS[name].split(), "--run_dir", "run") == 0
    capsys.readouterr()
    assert export("run", "-o", "models/mine", "--license", "apache-2.0") == 0
    said = capsys.readouterr().out
    assert f"wrote models/mine: {name}, step 6" in said and "of float32" in said
    difference = re.search(r"on 16 held-out tokens: largest difference (\S+)", said)
    assert difference and float(difference[1]) < 1e-5
    model = loaded(tmp_path / "models/mine")
    assert type(model).__name__ == name
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models/mine")
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    prompt = tokenizer("the drum", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=8, do_sample=False)[0])
    assert run_command(["sample", "run", "--prompt", "the drum", "--temperature", "0", "--max_tokens", "8"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == text
    card = (tmp_path / "models/mine/README.md").read_text()
    assert 'license: "apache-2.0"' in card and file_sha256(tmp_path / "models/mine/model.safetensors") in card
    assert "validation loss" in card and "| seed | 0 |" in card


def test_large_models_are_written_in_several_files_with_an_index(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--preset", "tiny", "--run_dir", "run") == 0
    assert export("run", "-o", "whole") == 0
    assert export("run", "-o", "parts", "--shard_size", "4kB", "--dtype", "bfloat16") == 0
    tokens = Tokenizer.load("run/tokenizer.json").vocab_size
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    index = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())
    stored = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            own = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        assert {index["weight_map"][name] for name in own} == {file.name}
        assert len(own) == 1 or sum(tensor.nbytes for tensor in own.values()) <= 4000
        stored |= own
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert stored.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    with safe_open(tmp_path / "whole/model.safetensors", framework="pt") as tensors:
        for name, tensor in stored.items():
            assert torch.equal(tensor, tensors.get_tensor(name).bfloat16()), name
    assert loaded(tmp_path / "parts").config.vocab_size == stored["transformer.wte.weight"].size(0) == tokens


def test_an_export_that_differs_fails_and_leaves_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*MODELS["LlamaForCausalLM"].split(), "--run_dir", "run") == 0

    def wrong(family: Family, config: Any) -> dict[str, Any]:
        return {**config_json(family, config), "rms_norm_eps": 0.1}

    monkeypatch.setattr("drumline.huggingface.companions.config_json", wrong)
    before = sorted(tmp_path.glob("[!d]*"))
    assert export("run", "-o", "new/mine") == 1
    assert (
        "computes other logits from the exported files than drumline: they differ by up to" in capsys.readouterr().err
    )
    assert sorted(tmp_path.glob("[!d]*")) == before and sorted(tmp_path.glob(".*")) == []


def test_without_transformers_an_export_says_that_it_was_not_compared(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--preset", "tiny", "--run_dir", "run") == 0
    monkeypatch.setattr(comparing.importlib.util, "find_spec", lambda name: None)
    assert export("run", "-o", "mine") == 0
    said = capsys.readouterr().out
    assert "logits were not compared: pip install 'drumline[hf]'" in said and "largest difference" not in said
    assert (tmp_path / "mine/model.safetensors").exists()


def test_a_checkpoint_and_a_single_file_can_be_exported(train: Train, tmp_path: Path) -> None:
    assert train("--preset", "tiny", "--run_dir", "run", "--save_every", "3") == 0
    _, file, _ = export_checkpoint(Path("run"), step=3, out=None, force=False)
    assert export("run/checkpoints/step-00000003", "-o", "three") == 0
    assert export(str(file), "-o", "file") == 0
    assert export("run", "-o", "six") == 0
    sums = [file_sha256(tmp_path / name / "model.safetensors") for name in ("three", "file", "six")]
    assert sums[0] == sums[1] != sums[2]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["missing", "-o", "out"], 1, "missing is neither a run nor a checkpoint of one"),
        (["run"], 2, "drumline export RUN -o FOLDER"),
        (["run", "-o", "text"], 1, "text already exists"),
        (["run", "-o", "out", "--dtype", "int8"], 2, "int8"),
        (["run", "-o", "out", "--to", "gguf"], 2, "gguf"),
        (["run", "-o", "out", "--shard_size", "huge"], 2, "write it as 5GB, or 500MB"),
        (["run", "-o", "text/1.txt/out"], 1, "is not writable (Not a directory)"),
        (["empty", "-o", "out"], 1, "the run empty has no checkpoint yet"),
        (["damaged", "-o", "out"], 1, "the run damaged has no valid checkpoint"),
    ],
)
def test_what_cannot_be_exported_is_said_in_two_lines_and_writes_nothing(
    words: list[str], code: int, said: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = words[0]
    if run != "missing":
        assert train("--preset", "tiny", "--run_dir", run) == 0
    if run in ("empty", "damaged"):
        for file in Path(run).glob("checkpoints/*/model*"):
            file.unlink() if run == "damaged" else [each.unlink() for each in file.parent.iterdir()]
    if run == "empty":
        for folder in Path(run).glob("checkpoints/*"):
            folder.rmdir()
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    assert export(*words) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_export(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from drumline.huggingface import exporting

    assert train("--preset", "tiny", "--run_dir", "run") == 0
    with pytest.MonkeyPatch.context() as patch:
        usage = exporting.shutil.disk_usage(".")
        patch.setattr(exporting.shutil, "disk_usage", lambda path: usage._replace(free=100))
        assert export("run", "-o", "mine") == 1
    error = capsys.readouterr().err
    assert "bytes are needed, 100 are free" in error
    assert not [path for path in tmp_path.iterdir() if "mine" in path.name]


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    before: list[weakref.ref[torch.Tensor]] = []

    def read(each: Mapped) -> torch.Tensor:
        assert not [alive for ref in before if (alive := ref()) is not None]
        tensor = torch.ones(each.shape)
        before.append(weakref.ref(tensor))
        return tensor

    config = GPTConfig(n_layers=3, n_heads=2, d_model=16, d_ff=32, vocab_size=300)
    every = shards(mapped(GPT2, config), torch.bfloat16, largest_bytes=8000)
    write_shards(every, tmp_path, torch.bfloat16, read=read)
    assert len(before) == len(mapped(GPT2, config))


def test_the_classes_are_listed_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert export("--list") == 0
    said = capsys.readouterr().out
    for name in MODELS:
        assert f"{name}: " in said
    assert "qk_norm True" in said and "activation relu2" in said
