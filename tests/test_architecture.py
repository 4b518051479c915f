"""The package's shape: rooms in one order that use each other's public names, and a small core that trains."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.closure import code_lines, loaded_by

import drumline
from drumline.lazy import public_names

SOURCE = Path(drumline.__file__).parent

# A room may import from those before it. What a run does not need is reached by `room(name)`, where it is asked for.
ROOMS = """
lazy errors units plugins signals
config files data model optim parallel pieces snapshots checkpoint report train
encoding packing stores chats mixes sharding trainer generate huggingface evals kernels decoding network serve watch
rendezvous elastic doctor launch bench reasons drill cli
""".split()
CORE = ROOMS[: ROOMS.index("train") + 1]
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every `from drumline... import`, wherever it stands."""
    imported = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "drumline":
            imported += [(str(node.module), name.name) for name in node.names]
        elif isinstance(node, ast.Import):
            imported += [(name.name, "") for name in node.names if name.name.startswith("drumline.")]
    return [each for each in imported if each != ("drumline", "__version__")]


def later_rooms(path: Path) -> set[str]:
    """Rooms that a module reaches by `room(name)`."""
    return {
        str(node.args[0].value).split(".")[0]
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "room"
        and isinstance(node.args[0], ast.Constant)
    }


def test_every_room_has_its_place() -> None:
    there = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if not path.name.startswith(("__", "py."))}
    assert sorted(ROOMS) == sorted(there)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_public_names_of_earlier_rooms(path: Path) -> None:
    own = room_of(path)
    before = ROOMS[: ROOMS.index(own)]
    for module, name in imports(path):
        other = module.split(".")[1] if "." in module else ""
        if other == own:
            continue
        assert other in before, f"{own} comes before {other or module}: {name}"
        if (SOURCE / other).is_dir():
            listed = public_names((SOURCE / other / "__init__.py").read_text(encoding="utf-8"))
            assert module == f"drumline.{other}" and name in listed, f"{module}.{name} is not public"
    assert later_rooms(path) <= set(ROOMS[ROOMS.index(own) + 1 :])


@pytest.mark.parametrize("folder", [SOURCE / room for room in ROOMS if (SOURCE / room).is_dir()], ids=lambda p: p.name)
def test_a_room_says_what_it_is_and_has_what_it_lists(folder: Path) -> None:
    init = folder / "__init__.py"
    assert ast.get_docstring(tree(init))
    listed = public_names(init.read_text(encoding="utf-8"))
    for name, module in listed.items():
        assert not (folder / f"{name}.py").exists(), f"{name} is a module of {folder.name} too: which of them is meant?"
        home = SOURCE.parent.joinpath(*module.split(".")).with_suffix(".py")
        assert home.is_relative_to(folder) and name in {
            each.id if isinstance(each, ast.Name) else each.name
            for node in tree(home).body
            for each in (ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else [node])
            if isinstance(each, ast.Name | ast.FunctionDef | ast.ClassDef)
        }, f"{module}.{name}"
    assert len([path for path in folder.glob("*.py") if path != init]) <= 13


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_and_functions_are_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400 and code_lines(text) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            # A command's signature and its help are one list of settings, however long.
            first = node.body[1:2] if room_of(path) == "cli" and ast.get_docstring(node) else [node]
            assert (node.end_lineno or 0) - first[0].lineno + 1 <= 60, node.name


UNPICKLES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "torch.distributed.elastic"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "recv_object_list"),
}
"""Modules and functions that run code of whoever wrote what they read."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_that_is_read_or_received_can_run_code(path: Path) -> None:
    for node in ast.walk(tree(path)):
        used = set()
        if isinstance(node, ast.Import):
            used = {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {name.name for name in node.names} - {"UnpicklingError"}
            used = names | ({str(node.module)} if names else set()) | {f"{node.module}.{name}" for name in names}
        elif isinstance(node, ast.Attribute):
            used = {node.attr, ast.unparse(node)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert ("weights_only", "True") in {(each.arg, ast.unparse(each.value)) for each in node.keywords}
        assert not {known for known in UNPICKLES for name in used if name == known or name.startswith(f"{known}.")}


def test_the_loop_fits_on_one_screen() -> None:
    (loop,) = [node for node in tree(SOURCE / "train/loop.py").body if getattr(node, "name", "") == "Loop"]
    assert isinstance(loop, ast.ClassDef)
    (run,) = [node for node in loop.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    assert (run.end_lineno or 0) - run.lineno + 1 <= 40


@pytest.mark.long
def test_a_run_on_one_cpu_loads_at_most_4500_lines_of_code(tmp_path: Path) -> None:
    words = "train --preset tiny --batch_size 2 --total_steps 2 --run_dir run --data_dir data"
    loaded = loaded_by(*words.split(), cwd=tmp_path)
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert not rooms & {"kernels", "network", "serve", "rendezvous", "elastic", "doctor", "launch", "bench", "drill"}
    assert sum(loaded.values()) <= 4500, loaded


def test_importing_drumline_does_not_import_torch() -> None:
    code = "import sys, drumline; assert 'torch' not in sys.modules; drumline.Trainer; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
