"""A run as one file: the page with its scripts, styles and data inside, which opens from a disk without any network."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from pathlib import Path
from typing import Any

from drumline import __version__
from drumline.errors import ConfigError
from drumline.files import RunFolder, replace_text
from drumline.watch.library import one_run
from drumline.watch.server import PAGE, ranks_of
from drumline.watch.source import AXES, RunSource, to_json

_STYLE = re.compile(r'<link rel="stylesheet" href="/page/([\w.]+)">\n')
_SCRIPT = re.compile(r'<script src="/page/([\w.]+)"></script>\n')


def write_report(run: Path, out: Path | None) -> Path:
    """Write the report of a run, by default as report.html into its folder."""
    source = one_run(run)
    out = out or source.folder.report
    _write(out, report_html(source))
    return out


def report_html(source: RunSource) -> str:
    """The whole page as text."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    styles, scripts = (
        "\n".join((PAGE / name).read_text(encoding="utf-8") for name in kind.findall(page))
        for kind in (_STYLE, _SCRIPT)
    )
    data: dict[str, Any] = {
        "runs": [source.summary()],
        "run": source.as_json(),
        "ranks": ranks_of(source),
        "curves": {axis: source.curves(axis=axis) for axis in AXES},
        "version": __version__,
        "made": time.time(),
    }
    # Inside of a script element, < could end it: text of a run stays text.
    embedded = to_json(data).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    rules = f"default-src 'none'; style-src '{_hash(styles)}'; script-src '{_hash(scripts)}'; img-src data:"
    page = _STYLE.sub("", page).replace(
        "</head>",
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"{rules}; base-uri 'none'; form-action 'none'\">\n"
        f"<style>{styles}</style>\n</head>",
    )
    block = f'<script type="application/json" id="embedded">{embedded}</script>\n<script>{scripts}</script>\n'
    return _SCRIPT.sub("", page).replace("</body>", f"{block}</body>")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def write_png(run: Path, out: Path | None) -> Path:
    """Draw the curves of a run, by default as report.png into its folder."""
    from drumline.report import plot_curves

    source = one_run(run)
    out = out or source.folder.path / "report.png"
    _make_folder(out)
    try:
        plot_curves(source.folder.metrics, out, title=source.name)
    except OSError as error:
        raise _not_written(out, error) from None
    return out


def _write(out: Path, text: str) -> None:
    _make_folder(out)
    try:
        replace_text(out, text)
    except OSError as error:
        raise _not_written(out, error) from None


def _make_folder(out: Path) -> None:
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", fix=f"give a file, as in -o {RunFolder(out).report}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(out, error) from None


def _not_written(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {out}: {error.strerror or error}", fix="choose another file with -o")
