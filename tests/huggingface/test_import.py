"""`--init_from` and `drumline import`: a run that begins with the weights of a model from elsewhere."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pretrained import CLASSES, tensors_in, written
from helpers.small import small
from helpers.warm import run_warm
from safetensors.torch import save_file

from drumline.checkpoint.checkpoints import checkpoint_paths
from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder
from drumline.generate.loading import load_run

TRAINING = (
    "--batch_size 2 --global_batch_size 4 --total_steps 6 --save_every 2 --eval_windows 4 --context 16 --device cpu "
    "--bitwise --train_data_path text"
).split()
KEEP = ["--keep_checkpoints", "9"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def sha256(run: str) -> Any:
    return RunFolder(Path(run)).read_status()["weights_sha256"]


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_imported_and_exported_has_the_same_bytes_in_every_tensor(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(here / "model", name, shard_size="5KB")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert len(list(model.glob("*.safetensors"))) > 1
    assert run_command(["import", "model", "-o", "run"]) == 0
    shutil.move("model", "elsewhere")
    assert run_command(["export", "run", "-o", "back"]) == 0
    difference = re.search(r"of bfloat16\n.*largest difference (\S+)", capsys.readouterr().out)
    assert difference and float(difference[1]) < 1e-4
    before, after = tensors_in(here / "elsewhere"), tensors_in(here / "back")
    assert before.keys() == after.keys()
    for each, tensor in before.items():
        assert after[each].dtype == tensor.dtype == torch.bfloat16 and torch.equal(after[each], tensor), each
    was, is_ = (json.loads((here / folder / "config.json").read_text()) for folder in ("elsewhere", "back"))
    assert {key: is_.get(key) for key in ("vocab_size", "eos_token_id", "tie_word_embeddings", "dtype")} == {
        key: was.get(key) for key in ("vocab_size", "eos_token_id", "tie_word_embeddings", "dtype")
    }
    assert (here / "back/chat_template.jinja").exists()
    assert (here / "back/tokenizer.json").read_bytes() == (here / "elsewhere/tokenizer.json").read_bytes()


def test_names_without_the_prefix_and_buffers_of_old_versions_are_read(here: Path) -> None:
    """As in the files of GPT-2 itself."""
    model = written(here / "model", "GPT2")
    assert run_command(["import", "model", "-o", "run"]) == 0
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors_in(model).items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, model / "model.safetensors")
    assert run_command(["import", "model", "-o", "again"]) == 0
    first, second = (load_run(Path(run)).model.state_dict() for run in ("run", "again"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("name", ["GPT2", "Qwen3"])
def test_a_run_begins_with_the_logits_of_the_model(name: str, here: Path) -> None:
    from transformers import AutoModelForCausalLM

    written(here / "model", name, dtype=torch.float32)
    assert run_command(["import", "model", "-o", "run"]) == 0
    own = load_run(Path("run")).model.eval()
    theirs = AutoModelForCausalLM.from_pretrained("model").eval()
    ids = torch.randint(200, (2, 9))
    with torch.no_grad():
        assert torch.allclose(own(ids)[0], theirs(ids).logits, atol=1e-4)


KILLING = """
import os, signal
from pathlib import Path
import torch

def adamw(model, settings):
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=settings.lr), []

    def die(*_):
        steps.append(1)
        if os.environ.get("RANK") == "1" and len(steps) == 3 and Path("model").exists():
            Path("model").rename("elsewhere")  # a restart does not need it
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_post_hook(die)
    return optimizer
"""


@pytest.mark.long
@pytest.mark.needs_shm
def test_one_rank_two_of_which_one_is_killed_and_an_imported_run_end_with_the_same_bits(here: Path) -> None:
    written(here / "model", "Llama")
    (here / "killing_optim.py").write_text(KILLING)
    training = ["train", *TRAINING, "--save_every", "100", "--optimizer", "killing_optim:adamw"]
    assert run_command([*training, "--init_from", "model", "--run_dir", "one"]) == 0
    assert run_command(["import", "model", "-o", "three"]) == 0
    words = [*training, "--init_from", "model", "--run_dir", "two", "--nproc", "2"]
    done = run_warm([sys.executable, "-m", "drumline", *words], cwd=here, timeout=180)
    assert done.returncode == 0 and "was killed by SIGKILL" in done.stderr, done.stderr
    assert run_command([*training, "--run_dir", "three"]) == 0
    assert sha256("one") == sha256("two") == sha256("three")
    assert run_command(["export", "two", "-o", "out"]) == 0
    before, after = tensors_in(here / "elsewhere"), tensors_in(here / "out")
    assert before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_that_goes_on_needs_its_model_no_more_and_ends_with_the_same_bits(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "model", "GPT2")
    assert run_command(["train", "--init_from", "model", *TRAINING, "--run_dir", "whole", *KEEP]) == 0
    said = capsys.readouterr().out
    assert "from   model: GPT2LMHeadModel, 16 of its 32 positions" in said
    shutil.rmtree("model")
    for kept in (2, 0):  # 0: as after a crash before the first save
        shutil.copytree("whole", f"from-{kept}")
        for path in checkpoint_paths(Path(f"from-{kept}/checkpoints")):
            if int(path.name[5:]) > kept:
                shutil.rmtree(path)
        assert run_command(["train", "--run_dir", f"from-{kept}"]) == 0
        assert f"(step {kept})" in capsys.readouterr().out
        assert sha256(f"from-{kept}") == sha256("whole")


def test_a_run_whose_checkpoints_are_all_damaged_reads_its_model_again_or_says_that_it_cannot(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "model", "GPT2")
    words = ["train", "--init_from", "model", "--run_dir", "run", *TRAINING]
    assert run_command(words) == 0
    wanted = sha256("run")

    def damage() -> None:
        for path in checkpoint_paths(RunFolder(Path("run")).checkpoints):
            (path / "run.json").write_text("harm")

    damage()
    assert run_command(words) == 0
    assert "no valid checkpoint is left: starting again from step 0" in capsys.readouterr().out
    assert sha256("run") == wanted
    damage()
    shutil.move("model", "elsewhere")
    assert run_command(words) == 1
    assert "model" in capsys.readouterr().err


def test_settings_of_the_optimizer_are_free_and_those_of_the_model_are_its_own(here: Path) -> None:
    written(here / "model", "Qwen3")
    flags = ["--optimizer", "muon", "--recipe", "modern", "--dropout", "0.1", "--n_kv_heads", "2", "--head_dim", "8"]
    assert run_command(["train", "--init_from", "model", *TRAINING, "--run_dir", "run", *flags]) == 0
    config = load_run(Path("run")).config
    assert config.model.preset == "pretrained" and config.optim.optimizer == "muon" and config.model.dropout == 0.1
    assert (config.model.softcap, config.model.smear, config.model.tie_embeddings) == (0.0, False, True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--n_layers", "3"], "--n_layers 3 contradicts model, which has 2"),
        (["--activation", "relu2"], "--activation relu2 contradicts model, which has swiglu"),
        (["--norm_eps", "1e-6"], "--norm_eps 1e-06 contradicts model, which has 1e-05"),
        (["--smear"], "--smear True contradicts model, which has False"),
        (["--vocab_size", "300"], "--vocab_size 300 contradicts model"),
        (["--context", "128"], "a context of 128 exceeds the 64 positions of model"),
        (["--preset", "gpt2"], "--preset gpt2 and --init_from model both set the model options"),
        (["--model", "my:model"], "is for drumline's own GPT, not for --model my:model"),
        (["--train_data_path", "tokens"], "tokens/train.bin was made with another tokenizer than that of model"),
        (["--train_data_path", "missing.txt"], "missing.txt"),
    ],
)
@pytest.mark.parametrize("way", ["train", "import"])
def test_a_flag_that_contradicts_the_model_is_refused_and_nothing_is_written(
    way: str, flags: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "model", "Llama")
    if "tokens" in flags:
        assert run_command(["prepare", "text", "--out", "tokens", "--vocab_size", "260"]) == 0
    if way == "import":
        if "--preset" in flags or "--model" in flags:
            pytest.skip("the run has a preset already")
        assert run_command(["import", "model", "-o", "run"]) == 0
    before = contents(here / "run")
    capsys.readouterr()
    start = ["--run_dir", "run"] if way == "import" else ["--init_from", "model", "--run_dir", "run"]
    assert run_command(["train", *TRAINING, *start, *flags]) == 1
    error = capsys.readouterr().err
    assert said in error and "fix: " in error
    assert contents(here / "run") == before
    assert (here / "run").exists() == (way == "import")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--run_dir", "old"], "old is a run that did not begin with model"),
        (
            ["--run_dir", "new", "--resume_from", "old"],
            "--resume_from old and --init_from model both say where to begin",
        ),
    ],
)
def test_a_run_begins_in_one_way(flags: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(here / "model", "GPT2")
    assert run_command(["train", *small("--train_data_path", "text", "--run_dir", "old")]) == 0
    assert run_command(["train", "--init_from", "model", *flags]) == 1
    assert said in capsys.readouterr().err and not (here / "new").exists()


def test_an_imported_model_with_learned_positions_keeps_them_all(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "model", "GPT2")
    assert run_command(["import", "model", "-o", "run"]) == 0
    assert run_command(["train", *TRAINING, "--run_dir", "run"]) == 1
    assert "a context of 16 is not the 32 that the imported model has learned" in capsys.readouterr().err
    assert run_command(["train", *TRAINING, "--run_dir", "run", "--context", "32"]) == 0


def break_config(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": [')


def truncate(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lead_out(model: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def link_out(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "other.safetensors")
    (model / "model.safetensors").symlink_to(model.parent / "other.safetensors")


def pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def changed(**tensors: torch.Tensor | None) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        found = {**tensors_in(model), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
        save_file({name: each for name, each in found.items() if each is not None}, model / "model.safetensors")

    return change


def in_config(**content: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))

    return change


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
        (break_config, "config.json is damaged"),
        (truncate, "model.safetensors is damaged, or no safetensors file"),
        (lead_out, "names a file outside of it: ../secret.safetensors"),
        (link_out, "names a file outside of it: model.safetensors, a link to"),
        (pickled, "pytorch_model.bin, a pickle, which could run any code when loaded"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
        (lambda model: (model / "adapter_config.json").touch(), "is an adapter (LoRA)"),
        (changed(model__norm__weight=None), "model.norm.weight is missing"),
        (changed(model__norm__weight=torch.ones(3)), "model.norm.weight has shape (3,), not (16,)"),
        (changed(model__layers__0__self_attn__q_proj__bias=torch.ones(16)), "q_proj.bias is unknown"),
        (changed(model__norm__weight=torch.ones(16, dtype=torch.int8)), "are I8: quantized"),
        (in_config(num_hidden_layers=1), "is unknown"),
        (in_config(rope_scaling={"rope_type": "llama3"}), "rope_type llama3"),
        (in_config(architectures=["MixtralForCausalLM"]), "is a MixtralForCausalLM"),
    ],
)
def test_a_folder_that_cannot_be_imported_is_refused_by_name(
    harm: Callable[[Path], None], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(written(here / "model", "Llama"))
    capsys.readouterr()
    assert run_command(["import", "model", "-o", "run"]) == 1
    error = capsys.readouterr().err
    assert said in error and "fix: " in error
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./missing", "-o", "run"], "there is no folder ./missing"),
        (["model", "-o", "text"], "text already exists"),
        (["model/config.json", "-o", "run"], "is neither a folder nor a .pt file"),
        (["model", "-o", "model/config.json/run"], "is not writable (Not a directory)"),
    ],
)
def test_wrong_names_are_refused(words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(here / "model", "Llama")
    assert run_command(["import", *words]) == 1
    assert said in capsys.readouterr().err


def test_without_a_tokenizer_a_model_trains_on_tokens_only(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(here / "model", "Llama")
    (model / "tokenizer.json").rename(here / "tokenizer.json")
    start = ["train", *TRAINING, "--init_from", "model", "--run_dir", "run"]
    assert run_command(start) == 1
    assert "model has no tokenizer.json" in capsys.readouterr().err
    assert run_command(["prepare", "text", "--out", "tokens", "--tokenizer", "tokenizer.json"]) == 0
    assert run_command([*start, "--train_data_path", "tokens"]) == 0
    assert run_command(["import", "model", "-o", "imported"]) == 0
    assert run_command(["train", *TRAINING, "--run_dir", "imported", "--train_data_path", "tokens/train.bin"]) == 0


def test_names_that_are_no_folders_come_from_the_hubs_cache(here: Path) -> None:
    """A folder in the layout of the hub's cache: snapshots are links to blobs."""
    model = written(here / "model", "Qwen3")
    cached = here / "hub/models--someone--small"
    (cached / "blobs").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    (cached / "snapshots/abc").mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.move(file, cached / f"blobs/{number}")
        (cached / "snapshots/abc" / file.name).symlink_to(f"../../blobs/{number}")
    env = {**os.environ, "HF_HUB_CACHE": str(here / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "drumline", "import"]
    done = run_warm([*command, "someone/small", "-o", "run"], cwd=here, env=env, timeout=120)
    assert done.returncode == 0 and "Qwen3ForCausalLM" in done.stdout, done.stderr
    done = run_warm([*command, str(cached / "snapshots/abc"), "-o", "again"], cwd=here, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    done = run_warm([*command, "someone/else", "-o", "none"], cwd=here, env=env, timeout=120)
    assert done.returncode == 1 and "the Hugging Face model someone/else cannot be downloaded" in done.stderr
    assert not (here / "none").exists()


def test_dry_run_and_the_first_lines_say_what_a_model_can_be_exported_to(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(here / "model", "Qwen3")
    assert run_command(["train", "--init_from", "model", "--dry_run", *TRAINING]) == 0
    said = capsys.readouterr()
    assert "can be exported to: Qwen3ForCausalLM" in said.err and 'preset = "pretrained"' in said.out
    for recipe, note in (
        ("modern", "with its own modelling file"),
        ("portable", "can be exported to: Qwen3ForCausalLM"),
    ):
        words = small("--recipe", recipe, "--train_data_path", "text", "--run_dir", recipe)
        assert run_command(["train", *words]) == 0
        assert run_command(["train", *words, "--dry_run"]) == 0
        said = capsys.readouterr()
        assert f"export {note}" in said.out and note in said.err
