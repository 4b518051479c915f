"""Tasks of lm-evaluation-harness with local files, and whether it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from helpers.stories import WORDS

HAS_HARNESS = all(importlib.util.find_spec(name) for name in ("lm_eval", "accelerate"))
CHOICE = """
task: stories_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/stories.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{passage}}"
doc_to_target: right
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """
task: stories_text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/stories.json}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{passage}}"
metric_list: [{metric: bits_per_byte}]
"""
WRITING = """
task: stories_writing
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/stories.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{passage}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["was"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
NAMES = ["stories_choice", "stories_text", "stories_writing"]


def write_tasks(folder: Path) -> None:
    """Three kinds of tasks, with a file of data beside them."""
    folder.mkdir()
    for name, text in zip(NAMES, (CHOICE, TEXT, WRITING), strict=True):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    rows = [
        {
            "passage": " ".join(WORDS[at % 7 : 8 + at]),
            "choices": [" " + " ".join(WORDS[(at + skip) % 20 :][: 1 + skip]) for skip in range(3)],
            "right": at % 3,
            "written": " quiet, as it",
        }
        for at in range(12)
    ]
    (folder / "stories.json").write_text("\n".join(map(json.dumps, rows)))
