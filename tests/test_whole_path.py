"""The whole path of a model: text, training, export, other programs, a server, a client; and one from elsewhere."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pretrained import tensors_in, written
from helpers.small import small
from helpers.stories import write_stories
from helpers.tasks import HAS_HARNESS, write_tasks
from helpers.warm import Warm, run_warm
from openai import OpenAI

from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder
from drumline.generate.loading import load_run

TRAINED = "--total_steps 25 --context 48 --d_model 32 --lr 0.02 --train_data_path stories --run_dir small".split()
PROMPT = "rain falls on green trees.\nThen all"


def drumline(*words: str) -> str:
    """What a command prints that succeeds."""
    done = run_warm([sys.executable, "-m", "drumline", *words], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported(folder: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the export of the run to a folder prints; here, where transformers has been imported."""
    capsys.readouterr()
    assert run_command(["export", "small", "-o", folder]) == 0
    return capsys.readouterr().out


def by_transformers(folder: str) -> tuple[Any, Any]:
    """The model and the tokenizer that transformers makes of a folder, with none of our code."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def written_by(model: Any, tokenizer: Any) -> str:
    """What transformers writes after the prompt."""
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt.input_ids.size(1) :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def assert_same_logits(run: str, model: Any, tokenizer: Any) -> None:
    """Of all ids that the exported model has: the vocabulary of a trained one is rounded up."""
    own = load_run(Path(run)).model.eval()
    ids = tokenizer("Story 3. rain falls on green trees", return_tensors="pt").input_ids
    with torch.no_grad():
        theirs = model(ids).logits
        torch.testing.assert_close(own(ids)[0][..., : theirs.size(-1)], theirs, atol=1e-5, rtol=1e-5)


@contextlib.contextmanager
def serving(run: str) -> Iterator[OpenAI]:
    """OpenAI's client of a server, which ends as it should."""
    words = [sys.executable, "-m", "drumline", "serve", run, "--port", "0", "--device", "cpu"]
    with Warm(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"API at (\S+)", process.stdout.readline())
            assert url
            with OpenAI(base_url=url[1], api_key="any", max_retries=0, timeout=60) as client:
                yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def assert_answers(client: OpenAI, *, text: str) -> None:
    """A completion is this text, whole and as a stream, and a chat has one answer, whole and as a stream."""
    more: dict[str, Any] = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 8}
    assert client.completions.create(prompt=PROMPT, **more).choices[0].text == text
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **more))
    assert len(chunks) > 1 and "".join(chunk.choices[0].text for chunk in chunks) == text
    asked = {"messages": [{"role": "user", "content": PROMPT}], **more}
    answer = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **asked)]
    assert answer and len(pieces) > 1 and "".join(pieces) == answer


def assert_evaluated(run: str) -> None:
    """By lm-evaluation-harness, with tasks of local files."""
    write_tasks(Path("tasks"))
    said = drumline("evaluate", run, "--tasks", "stories_choice,stories_text", "--include_path", "tasks")
    assert "stories_choice" in said and "bits_per_byte" in said, said
    (stored,) = (Path(run) / "evals").iterdir()
    assert json.loads(stored.read_text())["tasks"]["stories_choice"]["items"] == 12


@pytest.fixture
def stories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return write_stories(tmp_path / "stories")


@pytest.mark.parametrize("flags", ["--recipe portable", "--preset tiny"])
def test_a_trained_model_is_exported_loaded_served_talked_to_and_evaluated(
    flags: str, stories: Path, subtests: pytest.Subtests, capsys: pytest.CaptureFixture[str]
) -> None:
    drumline("train", *small(*flags.split(), *TRAINED))
    said = exported("exported", capsys)
    assert ("Qwen3ForCausalLM" if "portable" in flags else "GPT2LMHeadModel") in said
    model, tokenizer = by_transformers("exported")
    assert_same_logits("small", model, tokenizer)
    with serving("small") as client:
        assert_answers(client, text=written_by(model, tokenizer))
    with subtests.test("evaluated by lm-evaluation-harness"):
        if not HAS_HARNESS:
            pytest.skip("needs lm-eval and accelerate (pip install 'drumline[eval]' accelerate)")
        assert_evaluated("small")


def test_gpt_2_from_transformers_is_trained_on_two_ranks_and_goes_back(
    stories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(Path("gpt2"), "GPT2", dtype=torch.float32, n_embd=32, n_positions=96)
    steps = "--total_steps 4 --batch_size 4 --global_batch_size 8 --context 96 --eval_windows 4 --device cpu --lr 0.01"
    drumline(*"train --init_from gpt2 --train_data_path stories --run_dir small --nproc 2".split(), *steps.split())
    assert RunFolder(Path("small")).read_status()["state"] == "finished"
    assert "2 ranks" in Path("small/train.log").read_text()
    assert "GPT2LMHeadModel" in exported("trained", capsys)
    before, after = tensors_in(Path("gpt2")), tensors_in(Path("trained"))
    assert before.keys() == after.keys()
    assert all(after[name].shape == value.shape and not after[name].equal(value) for name, value in before.items())
    model, tokenizer = by_transformers("trained")
    assert_same_logits("small", model, tokenizer)
    for served in ("small", "trained"):  # a run, and a folder of Hugging Face
        with serving(served) as client:
            assert_answers(client, text=written_by(model, tokenizer))
