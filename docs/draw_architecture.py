"""Draw docs/architecture.svg: the rooms in their order, what each is for, and how data flows through them.

Order, captions and dotted lines are read from the code: run `python docs/draw_architecture.py` when they change.
"""

from __future__ import annotations

import ast
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/drumline"
WAY = {
    "text": ["data"],
    "tokens": ["data"],
    "batches": ["data"],
    "steps": ["train", "model", "optim", "parallel"],
    "checkpoints": ["checkpoint", "snapshots"],
    "reports": ["report"],
}
"""Stages of the data, and the rooms of each."""
FILLS = {"data": "#dbeafe", "steps": "#fde9c8", "checkpoint": "#dcf3dc", "report": "#f0e0f7"}
PLAIN, LATER, INK, GREY = "#f1f3f5", "#ffffff", "#1f2933", "#6b7785"
WIDTH, MARGIN, COLUMN, ROW, BOX = 1120, 30, 470, 66, 54
RIGHT = WIDTH - MARGIN - COLUMN


def rooms() -> list[str]:
    """ROOMS of tests/test_architecture.py."""
    for node in ast.parse((ROOT / "tests/test_architecture.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS":
            assert isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
            return str(ast.literal_eval(node.value.func.value)).split()
    raise AssertionError("tests/test_architecture.py has no ROOMS")


def caption(room: str) -> str:
    """The first line of a room's docstring."""
    tree = ast.parse((SOURCE / room / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").split("\n")[0].replace("<->", "↔").replace("->", "→").replace("`", "")


def reached_by_name(room: str) -> set[str]:
    """Later rooms that a room loads on demand: its calls of `room("name")`."""
    calls = [
        node
        for path in sorted((SOURCE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "room"
    ]
    return {node.args[0].value.split(".")[0] for node in calls if isinstance(node.args[0], ast.Constant)}


def fill(room: str) -> str:
    return FILLS.get("steps" if room in WAY["steps"] else room, PLAIN)


def text(x: float, y: float, words: str, *, size: int = 14, colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" {more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, more: str = "") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{colour}" '
        f'stroke="#9aa5b1" {more}/>'
    )


def room_box(room: str, x: float, y: float, width: float, *, later: bool = False) -> list[str]:
    lines = textwrap.wrap(caption(room), 48 if width == COLUMN else 140)
    assert len(lines) <= 2, f"the caption of {room} does not fit in its box"
    first = y + BOX / 2 + 5 - 8 * (len(lines) - 1)
    return [
        box(x, y, width, BOX, LATER if later else fill(room), 'stroke-dasharray="5 4"' if later else ""),
        text(x + 14, y + BOX / 2 + 5, room, size=16, more='font-weight="bold"'),
        *(text(x + 132, first + 17 * index, line, size=12) for index, line in enumerate(lines)),
    ]


def way(y: float) -> list[str]:
    """The data flow, with the rooms of each stage."""
    parts, gap = [], 34
    width = (WIDTH - 2 * MARGIN - gap * (len(WAY) - 1)) / len(WAY)
    middle = 'text-anchor="middle"'
    for index, (noun, makers) in enumerate(WAY.items()):
        x = MARGIN + index * (width + gap)
        parts.append(box(x, y, width, 44, fill(makers[0]), 'stroke-width="1.5"'))
        parts.append(text(x + width / 2, y + 27, noun, size=17, more=f'{middle} font-weight="bold"'))
        parts.append(text(x + width / 2, y + 63, ", ".join(makers), size=12, colour=GREY, more=middle))
        if index:
            parts.append(line(x - gap + 3, y + 22, x - 5, y + 22, 'marker-end="url(#arrow)" stroke-width="2"'))
    return parts


def line(x1: float, y1: float, x2: float, y2: float, more: str) -> str:
    return f'<path d="M{x1:g},{y1:g} L{x2:g},{y2:g}" fill="none" stroke="{INK}" {more}/>'


def dotted(core: dict[str, float], later: dict[str, float]) -> list[str]:
    """Lines from core rooms to the later rooms that they load on demand; `core`, `later`: name -> y."""
    more = f'stroke="{GREY}" stroke-width="1.6" stroke-dasharray="2 5" stroke-linecap="round" marker-end="url(#arrow)"'
    left, right = MARGIN + COLUMN + 3, RIGHT - 6
    parts = []
    for room, y in core.items():
        for name in sorted(reached_by_name(room) & later.keys()):
            start, end = y + BOX / 2, later[name] + BOX / 2
            bend = (right - left) / 2
            parts.append(
                f'<path d="M{left:g},{start:g} C{left + bend:g},{start:g} {right - bend:g},{end:g} {right:g},{end:g}" '
                f'fill="none" {more}/>'
            )
    return parts


def draw() -> str:
    """The diagram as SVG."""
    order = rooms()
    base = [room for room in order if not (SOURCE / room).is_dir()]
    door = order[-1]
    first_later = order.index("train") + 1
    core, later = order[len(base) : first_later], order[first_later:-1]
    parts = way(58)
    top = 216
    parts += [
        box(MARGIN, 148, WIDTH - 2 * MARGIN, 30, PLAIN),
        text(MARGIN + 14, 168, "  ".join(base), more='font-weight="bold" xml:space="preserve"'),
        text(WIDTH - MARGIN - 14, 168, "modules that every room may use", size=12, more='text-anchor="end"'),
        text(MARGIN, top - 12, "Core: all that a single process on a CPU needs", size=13, colour=GREY),
        text(RIGHT, top - 12, "Loaded on demand", size=13, colour=GREY),
    ]
    places = [{room: float(top + ROW * index) for index, room in enumerate(each)} for each in (core, later)]
    for room, y in places[0].items():
        parts += room_box(room, MARGIN, y, COLUMN)
    for room, y in places[1].items():
        parts += room_box(room, RIGHT, y, COLUMN, later=True)
    parts += dotted(*places)
    bottom = top + ROW * max(len(core), len(later))
    parts += room_box(door, MARGIN, bottom, WIDTH - 2 * MARGIN)
    notes = (
        "A room imports only public names of earlier rooms (top to bottom, left column first). "
        'Dotted: loaded on demand with room("name").'
    )
    parts.append(text(MARGIN, bottom + BOX + 26, notes, size=12, colour=GREY))
    parts.append(text(MARGIN, 38, "Data flow", size=20, more='font-weight="bold"'))
    height = bottom + BOX + 44
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="8" refY="5" markerUnits="userSpaceOnUse" '
            'markerWidth="10" markerHeight="10" orient="auto">'
            f'<path d="M0,0 L10,5 L0,10 z" fill="{GREY}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs/architecture.svg").write_text(draw(), encoding="utf-8")
