"""How much of drumline a command really loads, in lines of code: no blank line, comment or docstring counts."""

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_RUN = """
import json, os, sys, sysconfig
from drumline.cli.app import main
leave, path_of = os._exit, sysconfig.get_path
def get_path(name, *how, **more):
    # A package of the standard library is text enough: to prepare all of it would take most of the time.
    return path_of(name, *how, **more) + ("/encodings" if name == "stdlib" else "")
sysconfig.get_path = get_path
import drumline.report.records
drumline.report.records._SPARED_S = 3600.0  # on a busy machine, two steps take longer than that
os.getloadavg = lambda: (0.0, 0.0, 0.0)  # what is said about a busy machine is not part of a run
def ending(code):
    files = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "drumline" and m.__file__}
    print("\\nLOADED " + json.dumps(files), flush=True)
    leave(code)
os._exit = ending
try:
    main()
except SystemExit as error:
    ending(error.code or 0)
"""


def code_lines(source: str) -> int:
    """Lines that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", [])
        for each in body if isinstance(body, list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                docstrings.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def loaded_by(*words: str, cwd: Path) -> dict[str, int]:
    """Module -> lines of code, of all that `drumline WORDS` has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.rsplit("LOADED ", 1)[1])
    return {name: code_lines(Path(file).read_text(encoding="utf-8")) for name, file in sorted(files.items())}
