"""The package's shape: imports point one way, and only the modules that talk to people print."""

import ast
from pathlib import Path

import drumline

SOURCE = Path(drumline.__file__).parent

# Each line may import from the lines above it, and a module from those before it on its own line.
ORDER = """
errors disk finding cards
config
config_file presets bench_config plugins run_folder heartbeat causes
text_files text_hub text corpus token_manifest tokenizer tokens prepare
fused_cross_entropy fused_fp8 linear_cross_entropy positions model
fused_products fused_embedding fused_ops hardware fused_gpt
fused_muon fused_adamw muon optim cluster agreement records trackers plots
batches stragglers parallel step graphs stopping
storage checkpoints retention snapshots staging saver export resume guard evaluate training_data
loop
trainer sample runs pretrain dry_run inference checkpoint_commands terminal
ceilings workload bench_memory bench bench_report
machine gpus variables doctor
forked preload probe leader hosts_report hosts_alike hosts_judge hosts_meet hosts_look links hosts_check
meeting supervisor launch drill_run drill_faults drill
job_command launch_slurm launch_k8s
hosts_file far_end ssh_plan ssh_sessions ssh_checks launch_ssh
cli_bench cli_checkpoint cli_launch cli_doctor cli_jobs cli __main__
""".split()


def imports(module: str) -> set[str]:
    tree = ast.parse((SOURCE / f"{module}.py").read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "drumline":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drumline."):
            found.add(str(node.module).split(".")[1])
    return found - {"__version__"}


def test_every_module_has_its_place() -> None:
    assert sorted(ORDER) == sorted(path.stem for path in SOURCE.glob("*.py") if path.stem != "__init__")


def test_imports_point_one_way() -> None:
    for place, module in enumerate(ORDER):
        assert imports(module) <= set(ORDER[:place]), module


def test_no_file_is_longer_than_400_lines_and_no_function_than_60() -> None:
    for path in SOURCE.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                # A command's signature and its help are one list of settings, however long.
                first = node.body[1:2] if path.stem.startswith("cli") and ast.get_docstring(node) else [node]
                lines = (node.end_lineno or 0) - first[0].lineno + 1
                assert lines <= 60, f"{path.name}: {node.name}"


def test_importing_drumline_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, drumline; assert 'torch' not in sys.modules; drumline.Trainer; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
