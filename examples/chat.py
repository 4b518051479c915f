"""From text to a small model that answers questions about Python's standard library, without a download:

    python chat.py

writes questions and answers, made from docstrings, to chats.jsonl, trains a small GPT on plain text, tunes it on them
(`drumline train --format chat`), and asks it some. `drumline chat runs/chat` goes on asking. Each command is printed.
"""

import argparse
import importlib
import inspect
import json
import shlex
from pathlib import Path

from drumline.cli.app import run_command
from drumline.generate import Conversation, SampleConfig, writing_run

MODULES = "os.path string textwrap shutil glob random statistics math itertools functools re calendar bisect heapq"


def questions() -> list[tuple[str, str]]:
    """What does os.path.join do? And the first sentence of its docstring."""
    found = []
    for name in MODULES.split():
        for function, value in sorted(vars(importlib.import_module(name)).items()):
            said = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
            if callable(value) and not function.startswith("_") and 0 < len(said) <= 80:
                found.append((f"What does {name}.{function} do?", said))
    return found


def run(command: str) -> None:
    print(f"\n$ drumline {command}", flush=True)
    if code := run_command(shlex.split(command)):
        raise SystemExit(code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A small model that answers questions")
    parser.add_argument("--text", default="builtin", help="text to train on first (default: builtin)")
    parser.add_argument("--steps", type=int, default=120, help="steps on each of text and questions (default: 120)")
    args = parser.parse_args()
    asked = questions()
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in asked
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    length = f"--total_steps {args.steps} --context 128 --batch_size 8"
    run(f"train --recipe portable --train_data_path {args.text} --vocab_size 2048 {length} --run_dir runs/base")
    run("export runs/base -o base")
    run(f"train --init_from base --train_data_path chats.jsonl --format chat --lr 2e-3 {length} --run_dir runs/chat")
    conversation = Conversation(writing_run(Path("runs/chat"), device="auto"), SampleConfig(temperature=0.0))
    for question, _ in asked[:: len(asked) // 4]:
        print(f"\n> {question}\n{''.join(conversation.answer(question))}")
        conversation.clear()
