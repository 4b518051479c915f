"""Text with enough words and documents to make tasks from."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = "the cat dog runs over a small hill and then sleeps while rain falls on green trees near our old house".split()


def write_stories(folder: Path, *, count: int = 40) -> Path:
    """Documents of words in random order; each ends with the same sentence, which can be learned."""
    folder.mkdir()
    draw = random.Random(1)
    for number in range(count):
        words = " ".join(draw.choice(WORDS) for _ in range(40))
        (folder / f"{number}.txt").write_text(f"Story {number}. {words}.\nThen all was quiet, as it was before.")
    return folder
