"""`drumline chat`: a conversation in the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.cli.app import run_command


def test_a_conversation_goes_on_until_the_input_ends_and_each_answer_knows_what_was_said(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("--run_dir", "run", "--context", "64", "--total_steps", "12", "--lr", "0.02") == 0

    def answers(*lines: str) -> list[str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert run_command("chat run --temperature 0 --max_tokens 12 --device cpu".split()) == 0
        return capsys.readouterr().out.splitlines()

    once = answers("All work", "", "Document")
    again = answers("All work", "/clear", "All work", "/exit", "never read")
    assert len(once) >= 2 and once[0].strip()
    assert again[: len(again) // 2] == again[len(again) // 2 :]  # nothing is left of a conversation that is cleared


def test_a_folder_that_is_no_run_is_refused_in_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["chat", str(tmp_path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
