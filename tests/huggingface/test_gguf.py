"""llama.cpp: its own converter makes a GGUF file of an export, from which llama.cpp computes the same logits."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.stories import write_stories

from drumline.cli.app import run_command
from drumline.generate.loading import load_run

SOURCE = Path(os.environ.get("LLAMA_CPP", "llama.cpp"))
CONVERTER = SOURCE / "convert_hf_to_gguf.py"
NEEDED = ("gguf", "sentencepiece", "llama_cpp")
pytestmark = pytest.mark.skipif(
    not CONVERTER.exists() or not all(importlib.util.find_spec(name) for name in NEEDED),
    reason="needs gguf, sentencepiece, llama-cpp-python, and LLAMA_CPP, the folder of llama.cpp's source",
)
# The converter knows tokenizers by a hash of what they make of a text. One that drumline trained has GPT-2's pattern
# for words, which is what docs/huggingface.md says to add.
CONVERT = """
import runpy, sys
sys.path.insert(0, {source!r})
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = ["convert", *{words!r}]
runpy.run_path({converter!r}, run_name="__main__")
"""
MODELS = {
    "Qwen3ForCausalLM": "--recipe portable",
    "GPT2LMHeadModel": "--preset tiny",
    "LlamaForCausalLM": "--preset tiny --positions rope --norm rmsnorm --activation swiglu --no-bias",
    "ArceeForCausalLM": "--preset tiny --positions rope --norm rmsnorm --activation relu2 --no-bias",
}


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_from_a_converted_export(
    name: str, train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stories(tmp_path / "stories")
    sizes = "--d_model 64 --d_ff 256 --context 48 --total_steps 15 --train_data_path stories --run_dir run"
    assert train(*MODELS[name].split(), *sizes.split()) == 0
    assert run_command(["export", "run", "-o", "exported"]) == 0
    assert name in capsys.readouterr().out
    words = ["exported", "--outfile", "model.gguf", "--outtype", "f32"]
    code = CONVERT.format(source=str(SOURCE), words=words, converter=str(CONVERTER))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    from llama_cpp import Llama

    theirs = Llama("model.gguf", n_ctx=48, logits_all=True, n_threads=1, verbose=False)
    run = load_run(tmp_path / "run")
    assert run.tokenizer is not None
    text = "Story 3. rain falls on green trees.\nThen all was quiet"
    ids = run.tokenizer.encode(text)
    assert theirs.tokenize(text.encode(), add_bos=False, special=False) == ids
    theirs.eval(ids)
    with torch.no_grad():
        ours = run.model.eval()(torch.tensor([ids]))[0][0, :, : run.tokenizer.vocab_size].numpy()
    np.testing.assert_allclose(theirs.scores[: len(ids)], ours, atol=5e-3)
    assert (theirs.scores[: len(ids)].argmax(-1) == ours.argmax(-1)).all()
