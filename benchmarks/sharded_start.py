"""From the start of a sharded run to its first step, from a checkpoint: seconds, bytes read and memory per rank.

    python benchmarks/sharded_start.py --preset gpt2 --ranks 2 4
    python benchmarks/sharded_start.py --preset gpt2-xl --ranks 1 --device cuda

Makes the checkpoint first, by a run of one step on the first number of ranks. Bytes read: what each rank reads to
verify its part of the files (as Linux counts it), and the rows that it takes from them, which are mapped. `drumline
train` itself, under torchrun.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from header import header

_RANK = "DRUMLINE_SHARDED_START"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--vocab_size", type=int, default=50257)
    arguments = parser.parse_args()
    header()
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(arguments.vocab_size, size=1 << 16, dtype=np.uint16)
        tokens.tofile(Path(folder, "random.bin"))
        words = (
            f"train --preset {arguments.preset} --context {arguments.context} --vocab_size {arguments.vocab_size} "
            f"--train_data_path {folder}/random.bin --data_dtype uint16 --run_dir {folder}/run --batch_size 1 "
            f"--global_batch_size {max(arguments.ranks)} --device {arguments.device} --shard full --keep_checkpoints 9 "
            "--allow_change total_steps --total_steps"
        ).split()
        launched(arguments.ranks[0], [*words, "1"], Path(folder))
        size = sum(path.stat().st_size for path in Path(folder, "run/checkpoints/step-00000001").iterdir())
        print(f"{arguments.preset}: checkpoint {size / 1e9:.3f} GB", flush=True)
        for number, ranks in enumerate(arguments.ranks):
            took = launched(ranks, [*words, str(2 + number), "--resume_from", "1"], Path(folder))
            for name in ("initialized", "resumed", "first step"):
                print(f"{ranks} ranks, {name}: " + shown([each[name] for each in took]), flush=True)
            for newer in Path(folder, "run/checkpoints").glob("step-*[!1]"):  # one of gpt2-xl is 19 GB
                shutil.rmtree(newer)


def shown(facts: list[dict[str, float]]) -> str:
    """The most of any rank."""
    most = {name: max(each[name] for each in facts) for name in facts[0]}
    return (
        f"{most['seconds']:.1f} s, {most['read'] / 1e6:,.0f} MB read to verify, {most['rows'] / 1e6:,.0f} MB of rows, "
        f"{most['grown'] / 1e6:,.0f} MB more memory than at the start"
    )


def launched(ranks: int, words: list[str], folder: Path) -> list[dict[str, dict[str, float]]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
    environ = {**os.environ, _RANK: str(folder), "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    subprocess.run([*command, *words], env=environ, check=True, stdout=subprocess.DEVNULL)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def rank() -> None:
    import torch.distributed.fsdp

    import drumline.checkpoint.restoring
    import drumline.sharding.step  # noqa: F401
    from drumline.cli.app import run_command
    from drumline.pieces import Stored
    from drumline.train import Loop
    from drumline.train.history import History

    began, read, base, rows = time.perf_counter(), counted("rchar"), resident("VmRSS"), [0]
    Path("/proc/self/clear_refs").write_text("5")
    found: dict[str, dict[str, float]] = {}
    begin, step, fill = History.begin, Loop._step, Stored.fill

    def note(name: str) -> None:
        grown, seconds = resident("VmHWM") - base, time.perf_counter() - began
        facts = {"seconds": seconds, "read": counted("rchar") - read, "rows": rows[0], "grown": grown}
        found.setdefault(name, facts)

    def beginning(history: History) -> int:
        note("initialized")
        at = begin(history)
        note("resumed")
        return at

    def stepping(loop: Loop, at: int) -> object:
        result = step(loop, at)
        note("first step")
        return result

    def filling(stored: Stored, name: str, into: torch.Tensor, start: int = 0) -> None:
        rows[0] += into.nbytes
        fill(stored, name, into, start)

    History.begin, Loop._step, Stored.fill = beginning, stepping, filling  # type: ignore[method-assign, assignment]
    code = run_command(sys.argv[1:])
    Path(os.environ[_RANK], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.exit(code)


def counted(name: str) -> int:
    return int(re.findall(rf"^{name}: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[0])


def resident(name: str) -> int:
    return 1024 * int(re.findall(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0])


if __name__ == "__main__":
    rank() if _RANK in os.environ else main()
