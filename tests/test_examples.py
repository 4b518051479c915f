"""The examples, run as their users run them: every command of the tutorials that they are for, in its order."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.small import small
from helpers.warm import Warm

from drumline.files.run_folder import RunFolder
from drumline.network.interfaces import free_port
from drumline.report.records import read_metrics

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TIMEOUT_S = 240
PROGRAMS = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "drumline": ["-m", "drumline"]}
OTHER_NAMES = {"set_distributed.py": "train_distributed.py", "pytorch_examples/3.torchrun.py": "torchrun_snapshot.py"}
"""Scripts that a tutorial calls by another name."""


def start(where: Path, *words: str) -> subprocess.Popen[str]:
    """Python with these arguments, on the CPU, in a folder that takes all it leaves behind."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "offline",
        "TMPDIR": str(where),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return Warm(
        [sys.executable, *words], cwd=where, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(where: Path, *commands: list[str]) -> str:
    """Run these at the same time; gives what the first of them said."""
    said = []
    with ExitStack() as stack:
        processes = [stack.enter_context(start(where, *command)) for command in commands]
        try:
            said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.terminate()  # a launcher that hangs takes its ranks with it
    assert [process.returncode for process in processes] == [0] * len(commands), "\n".join([str(commands), *said])
    return said[0]


def run_here(where: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script as one rank in this process, which has imported torch already."""
    monkeypatch.chdir(where)
    monkeypatch.setattr(sys, "argv", argv)
    with suppress(SystemExit):
        runpy.run_path(argv[0], run_name="__main__")


def hosts(tutorial: str) -> Iterator[list[str]]:
    """The commands of a tutorial in its order; those that are for two hosts come together."""
    together: list[str] = []
    for line in tutorial.replace("\\\n", " ").strip().splitlines():
        together.append(line.strip())
        if "node_rank=0" not in line:
            yield together
            together = []


def type_in(where: Path, tutorial: str, *, short: Callable[[list[str]], Sequence[str]]) -> list[str]:
    """Type the commands of a tutorial, with half of their ranks, into a folder that has the examples.

    short: of a command, more flags that make the work less
    """
    for script in EXAMPLES.glob("*.py"):
        (where / script.name).write_bytes(script.read_bytes())
    for name, script_name in OTHER_NAMES.items():
        (where / name).parent.mkdir(exist_ok=True)
        (where / name).write_bytes((EXAMPLES / script_name).read_bytes())
    said = []
    for commands in hosts(tutorial):
        port = free_port()
        said.append(run(where, *(words_of(command, port, short) for command in commands)))
    return said


def words_of(command: str, port: int, short: Callable[[list[str]], Sequence[str]]) -> list[str]:
    """Python's arguments for a command of a tutorial."""
    changes = {
        r"(?<=nproc_per_node=)\d+|(?<=nproc-per-node=)\d+|(?<=world_size )\d+": lambda n: str(max(1, int(n[0]) // 2)),
        r"(?<=master_addr=)\S+": lambda _: "127.0.0.1",
        r"(?<=master_port=)\d+": lambda _: str(port),
        r"/data/|/path/to/": lambda _: "",
    }
    for pattern, change in changes.items():
        command = re.sub(pattern, change, command)
    program, *words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    words = [*PROGRAMS[program], *words]
    if words[0] == "-m" and "drumline" not in words and not any("master_port" in word for word in words):
        words.insert(2, f"--master_port={port}")  # 29500 is for only one run of this machine
    return [*words, *short(words)]


def script(name: str, *flags: str) -> list[str]:
    return [str(EXAMPLES / name), *flags]


def finished(folder: Path) -> dict[str, Any]:
    status = RunFolder(folder).read_status()
    assert status["state"] == "finished" and status["step"] == status["total_steps"]
    return status


def losses(folder: Path) -> dict[int, float]:
    finished(folder)
    return {r["step"]: r["loss"] for r in read_metrics(RunFolder(folder).metrics) if "loss" in r}


def sequences_per_step(folder: Path) -> int:
    checkpoint = RunFolder(folder).checkpoint(finished(folder)["step"])
    facts = json.loads((checkpoint / "run.json").read_text())["facts"]
    return int(facts["global_batch_size"])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_listed(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    assert f"{path.name} " in (EXAMPLES / "README.md").read_text()


def test_the_commands_for_train_work_in_their_order_in_one_folder(tmp_path: Path) -> None:
    tutorial = """
        python train.py --batch_size 8
        torchrun --nproc_per_node=4 train.py --batch_size 8
        CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py --batch_size 8
        torchrun --nnodes=2 --nproc_per_node=4 --node_rank=0 --master_addr=192.168.1.100 --master_port=29500 \\
            train.py --batch_size 8
        torchrun --nnodes=2 --nproc_per_node=4 --node_rank=1 --master_addr=192.168.1.100 --master_port=29500 \\
            train.py --batch_size 8
        torchrun --nnodes=2 --nproc_per_node=1 --node_rank=0 --master_addr=192.168.1.100 --master_port=29500 \\
            train.py --batch_size 8
        torchrun --nnodes=2 --nproc_per_node=1 --node_rank=1 --master_addr=192.168.1.100 --master_port=29500 \\
            train.py --batch_size 8
        python train.py
        torchrun --nproc_per_node=4 train.py
    """
    said = type_in(tmp_path, tutorial, short=lambda words: ["--epochs", "1"])
    assert said[0].startswith("run    runs/train\n") and "| epoch 0.08/1 |" in said[0]
    folders = ["train", *(f"train-{number}" for number in range(2, 8))]
    steps = [sequences_per_step(tmp_path / "runs" / folder) for folder in folders]
    assert steps == [8, 16, 8, 32, 16, 32, 64]
    for ranks, alone in (("train-2", "train-5"), ("train-3", "train"), ("train-4", "train-6")):
        assert losses(tmp_path / "runs" / ranks) == pytest.approx(losses(tmp_path / "runs" / alone), abs=1e-4)


@pytest.mark.long
def test_the_commands_for_ddp_gpt_wikitext2_work_in_their_order_in_one_folder(tmp_path: Path, text: Path) -> None:
    tutorial = """
        torchrun --nproc_per_node=2 ddp_gpt_wikitext2.py
        torchrun --nproc_per_node=1 ddp_gpt_wikitext2.py
        torchrun --nproc_per_node=2 ddp_gpt_wikitext2.py --epochs 5 --batch_size 32 --vocab_size 5000
        torchrun --nnodes=2 --nproc_per_node=1 --node_rank=0 --master_addr=172.25.0.100 --master_port=29500 \\
            ddp_gpt_wikitext2.py --epochs 3 --batch_size 8
        torchrun --nnodes=2 --nproc_per_node=1 --node_rank=1 --master_addr=172.25.0.100 --master_port=29500 \\
            ddp_gpt_wikitext2.py --epochs 3 --batch_size 8
    """
    short = "--dataset text --epochs 1 --vocab_size 300".split()
    said = type_in(tmp_path, tutorial, short=lambda words: short)
    assert "context 128" in said[0] and "| epoch " in said[0] and "sample:" in said[0]
    folders = ["tiny", "tiny-2", "tiny-3", "tiny-4"]
    assert [sequences_per_step(tmp_path / "runs" / folder) for folder in folders] == [8, 8, 32, 16]


def test_the_command_for_train_ddp_trains_a_gpt_on_a_dataset_of_dicts(tmp_path: Path) -> None:
    (said,) = type_in(tmp_path, "torchrun --nproc-per-node=4 train_ddp.py", short=lambda words: [])
    assert finished(tmp_path / "runs/train_ddp")["step"] == 50
    assert sequences_per_step(tmp_path / "runs/train_ddp") == 8 * 2
    assert said.count("step  10/50 | loss 9.") == 1  # one rank speaks; ln 10000 is 9.21


def test_the_commands_for_snapshots_work_in_their_order_in_one_folder(tmp_path: Path) -> None:
    tutorial = """
        python multi_gpus.py 50 10 --batch_size 1024
        python multi_gpus.py 50 10 --batch_size 512 --nproc 2
        torchrun --standalone --nproc_per_node=4 pytorch_examples/3.torchrun.py 25 10
        torchrun --standalone --nproc_per_node=4 pytorch_examples/3.torchrun.py 50 10
        torchrun --nproc_per_node=2 --nnode=2 --node_rank=0 multinode.py 50 10
        torchrun --nproc_per_node=4 --nnode=2 --node_rank=1 multinode.py 50 10
    """
    said = type_in(tmp_path, tutorial, short=lambda words: [])
    runs = tmp_path / "runs"
    assert {path.name for path in (runs / "multi_gpus/checkpoints").iterdir()} == {
        f"step-{2 * epoch:08d}" for epoch in (30, 40, 50)
    }
    assert losses(runs / "multi_gpus-2") == pytest.approx(losses(runs / "multi_gpus"), abs=1e-4)
    assert "resuming from" in said[3] and "(step 50)" in said[3]
    assert finished(runs / "3.torchrun")["step"] == 100 and not (runs / "3.torchrun-2").exists()
    assert "rank 0 of 3 is local rank 0 on" in said[4]
    assert sequences_per_step(runs / "multinode") == 3 * 4


def test_a_run_that_goes_on_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    for epochs in ("2", "4"):
        run(tmp_path, [*TORCHRUN, *script("torchrun_snapshot.py", epochs, "1")])
    run(tmp_path, [*TORCHRUN, *script("torchrun_snapshot.py", "4", "1", "--run_dir", "whole")])
    parts, whole = finished(tmp_path / "runs/torchrun_snapshot"), finished(tmp_path / "whole")
    assert parts["weights_sha256"] == whole["weights_sha256"] and parts["step"] == 8


@pytest.mark.long
def test_no_ranks_are_refused(tmp_path: Path) -> None:
    with start(tmp_path, str(EXAMPLES / "train_distributed.py"), "--distributed", "--world_size", "0") as process:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    assert "nproc" in said and process.returncode in (1, 2), said


def test_the_commands_for_train_distributed_work_in_their_order_in_one_folder(tmp_path: Path) -> None:
    tokens = (np.arange(4000) * 7 % 290).astype("<u2")
    tokens.tofile(tmp_path / "train.bin")
    tokens[:500].tofile(tmp_path / "val.bin")
    (tmp_path / "checkpoints").mkdir()
    data = "--train_data_path /data/train.bin --valid_data_path /data/val.bin"
    on_hosts = "--nproc_per_node=8 --nnodes=2 --master_addr=192.168.1.1 --master_port=29500"
    tutorial = f"""
        python train_distributed.py {data} --batch_size 8 --total_steps 10000
        torchrun --nproc_per_node=4 train_distributed.py --distributed {data} --batch_size 8 --total_steps 10000
        python -m torch.distributed.launch --nproc_per_node=4 --master_port=29500 train_distributed.py --distributed \\
            {data} --batch_size 8
        python train_distributed.py --distributed --world_size 4 {data} --batch_size 8
        torchrun {on_hosts} --node_rank=0 set_distributed.py --distributed {data}
        torchrun {on_hosts} --node_rank=1 set_distributed.py --distributed {data}
        torchrun --nproc_per_node=4 train_distributed.py --distributed --batch_size 4 --gradient_accumulation_steps 4
        torchrun --nproc_per_node=4 train_distributed.py --distributed --dtype bfloat16 --batch_size 16
        drumline checkpoint export runs/modern-tiny-2 --step 4 --out checkpoints/checkpoint_step_5000.pt
        torchrun --nproc_per_node=4 train_distributed.py --distributed \\
            --resume_from checkpoints/checkpoint_step_5000.pt {data}
        torchrun --master_port=29501 --nproc_per_node=4 train_distributed.py --distributed --batch_size 2
        python train_distributed.py --distributed --backend gloo
        torchrun --nproc_per_node=4 train_distributed.py --distributed --use_wandb --wandb_project my-transformer \\
            --wandb_run_name 4gpu-bf16-experiment
    """

    def short(words: list[str]) -> list[str]:
        if "drumline" in words:
            return []
        if "--resume_from" in words:
            return ["--log_every", "1"]  # all else is in the file
        usual = small("--dtype", "float32", "--train_data_path", "train.bin")
        pairs = zip(usual[::2], usual[1::2], strict=True)
        flags = [word for name, value in pairs if name not in words for word in (name, value)]
        return [*flags, "--total_steps", "6", "--save_every", "2"]

    type_in(tmp_path, tutorial, short=short)
    runs = tmp_path / "runs"
    named = {number: runs / f"modern-tiny{'' if number == 1 else f'-{number}'}" for number in range(1, 12)}
    steps = [sequences_per_step(folder) for folder in named.values()]
    assert steps == [8, 16, 16, 16, 32, 32, 32, 16, 4, 4, 8]
    for number in (3, 4):
        assert losses(named[number]) == pytest.approx(losses(named[2]), abs=1e-5)
    assert list((named[11] / "wandb").glob("offline-run-*"))
    resumed = losses(named[8])
    assert list(resumed) == [5, 6] and resumed == pytest.approx({s: losses(named[2])[s] for s in resumed}, abs=1e-5)


@pytest.mark.needs_shm  # where workers put their samples
def test_the_image_classifier_learns_on_two_ranks_with_workers(tmp_path: Path) -> None:
    flags = "--epochs 1 --batch_size 64".split()
    said = run(tmp_path, [*TORCHRUN, *script("image_classifier.py", *flags)])
    records = read_metrics(tmp_path / "runs/image_classifier/metrics.jsonl")
    accuracies = [record["valid_accuracy"] for record in records if "valid_accuracy" in record]
    assert len(accuracies) == 1 and accuracies[0] > 0.5  # of four classes
    assert "| accuracy " in said and "best accuracy so far" in said


def test_any_hugging_face_model_is_fine_tuned_and_saved_for_from_pretrained(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train([str(text / "0.txt")], trainers.WordLevelTrainer(special_tokens=["?"]))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "model")
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("".join(path.read_text() for path in sorted(text.iterdir())))
    flags = "model text.txt --epochs 2 --length 16 --batch_size 8 --lr 0.05".split()
    run_here(tmp_path, script("finetune_hugging_face.py", *flags), monkeypatch)
    curve = list(losses(tmp_path / "runs/finetune_hugging_face").values())
    assert curve[-1] < curve[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")


def test_a_small_model_is_trained_on_text_then_on_conversations_and_asked(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tmp_path, script("chat.py", "--text", "text", "--steps", "2"), monkeypatch)
    assert [finished(tmp_path / "runs" / name)["step"] for name in ("base", "chat")] == [2, 2]
    assert capsys.readouterr().out.count("\n> What does ") >= 4
