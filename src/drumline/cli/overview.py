"""`drumline --help`: all commands on one page, without the parser, whose import would take most of the time."""

from __future__ import annotations

import shutil
import textwrap

COMMANDS = {
    "drumline.cli.prepare:prepare": "Tokenize text into .bin files, in the format of nanoGPT.",
    "drumline.cli.prepare:data": "Show what a run has seen of each of its sources, or what a prepared folder has.",
    "drumline.cli.train:train": "Train a model. Without arguments: a small GPT on Python source code.",
    "drumline.cli.generate:evaluate": "Validation loss of a run's newest checkpoint, or its results in tasks.",
    "drumline.cli.generate:sample": "Generate text with a run's newest checkpoint.",
    "drumline.cli.runs:export": "Export a run as a Hugging Face model, or list which settings are which class.",
    "drumline.cli.runs:import_": "Make a run of a Hugging Face model, or of nanoGPT's ckpt.pt, without training.",
    "drumline.cli.generate:chat": "Talk to a run's newest checkpoint in the terminal.",
    "drumline.cli.generate:serve": "Serve a run's newest checkpoint: OpenAI's API, and a page to talk to the model.",
    "drumline.cli.runs:runs": "List runs with their state and latest losses.",
    "drumline.cli.runs:watch": "A live page of runs: curves, ranks, events and samples, from their folders alone.",
    "drumline.cli.runs:report": "Write one file about a run: its curves, config, events, samples.",
    "drumline.cli.reasons:blame": "List the documents of a step by their losses; make a list of those to leave out.",
    "drumline.cli.reasons:replay": "Compute steps of a run again, and compare them with its records bit by bit.",
    "drumline.cli.reasons:diff": "Find the step, and the tensor, in which two runs part.",
    "drumline.cli.checkpoint:checkpoint": "List, verify, export or prune the checkpoints of a run.",
    "drumline.cli.bench:bench": "Measure training throughput, where step time goes, and the largest batch that fits.",
    "drumline.cli.doctor:doctor": "Check this machine, or several hosts, and print a fix for each problem.",
    "drumline.cli.launch:launch": "Start one run on several hosts over SSH, or as a SLURM or Kubernetes job.",
    "drumline.cli.bench:drill": "Inject faults into a small run repeatedly and verify that no work is lost.",
}
"""Module of each command, and its line in `drumline --help`, which imports none of them."""
_ABOUT = "Train GPT-style language models: from raw text to a model that generates text, with one command."
_FLAGS = {"--help, -h": "Display this page.", "--version": "Display the version."}
_WIDEST = 120


def overview() -> str:
    """The page, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    rows = {place.rpartition(":")[2].rstrip("_"): text for place, text in COMMANDS.items()} | _FLAGS
    first = max(map(len, rows)) + 4
    page = ["Usage: drumline COMMAND [--help]", "", *textwrap.wrap(_ABOUT, width), "", "Commands:"]
    for name, text in rows.items():
        lines = textwrap.wrap(text, max(20, width - first), break_on_hyphens=False)
        page += [f"  {name}".ljust(first) + lines[0], *(" " * first + line for line in lines[1:])]
    return "\n".join(page) + "\n"
