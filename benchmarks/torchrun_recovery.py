"""What plain torchrun with DDP does about the faults that benchmarks/faults.py measures; the same model and ranks.

    python benchmarks/torchrun_recovery.py [--repeat 20] [--patience 30]

The training script is the usual one: DistributedDataParallel, gloo, a snapshot with torch.save by rank 0 every few
steps, `torchrun --standalone --nproc_per_node=2 --max_restarts=3`. A run that does not train again within `--patience`
seconds of a fault counts as stuck.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
from header import header

STEP_S = 0.1


def train(folder: Path) -> None:
    """One rank of the usual script."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    snapshot, step = folder / "snapshot.pt", 0
    if snapshot.exists():
        state = torch.load(snapshot, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        step += 1
        time.sleep(STEP_S)
        (folder / f"rank-{rank}").write_text(f"{os.getpid()} {step}")
        if rank == 0 and step % 5 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, snapshot)


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        with (folder / "log").open("w") as log:
            self.agent = subprocess.Popen(
                [*command, "--max_restarts=3", __file__, "--train", str(folder)], stdout=log, stderr=log
            )
        self.wait_for_a_step({}, 60.0)

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Each rank's process and step."""
        ranks = {}
        for rank in (0, 1):
            words = (
                (self.folder / f"rank-{rank}").read_text().split() if (self.folder / f"rank-{rank}").exists() else []
            )
            if len(words) == 2:
                ranks[rank] = int(words[0]), int(words[1])
        return ranks

    def wait_for_a_step(self, before: dict[int, tuple[int, int]], patience_s: float) -> float | None:
        """Seconds until both ranks have trained a step as other processes than before."""
        began = time.monotonic()
        while time.monotonic() - began < patience_s and self.agent.poll() is None:
            now = self.ranks()
            if len(now) == 2 and all(now[rank][0] != before.get(rank, (0, 0))[0] for rank in now):
                return time.monotonic() - began
            time.sleep(0.02)
        return None

    def end(self) -> None:
        for process in psutil.Process(self.agent.pid).children(recursive=True) if self.agent.poll() is None else []:
            process.kill()
        self.agent.kill()
        self.agent.wait()
        for pid, _ in self.ranks().values():
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def fault(name: str, repeat: int, patience_s: float) -> None:
    recovered, stuck, failed = [], 0, 0
    for number in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder))
            try:
                before = run.ranks()
                os.kill(before[number % 2][0], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[name])
                again = run.wait_for_a_step(before, patience_s)
                if again is not None:
                    recovered.append(again)
                elif run.agent.poll() is None:
                    stuck += 1
                else:
                    failed += 1
            finally:
                run.end()
    times = f"in {median(recovered):.1f} s, at worst {max(recovered):.1f} s" if recovered else ""
    print(f"{name:<6} recovered {len(recovered)} of {repeat} {times}, stuck {stuck}, failed {failed}", flush=True)


def launcher_signal(signum: signal.Signals) -> None:
    """What is left 2 s after the launcher got a signal, and whether the last step was saved."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        try:
            time.sleep(1)
            before = run.ranks()
            run.agent.send_signal(signum)
            time.sleep(2)
            left = [pid for pid, _ in before.values() if psutil.pid_exists(pid)]
            print(f"{signum.name} to the launcher: {len(left)} of 2 ranks still there after 2 s, nothing saved for it")
        finally:
            run.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--patience", type=float, default=30.0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    header()
    fault("kill", arguments.repeat, arguments.patience)
    fault("stop", max(1, arguments.repeat // 10), arguments.patience)
    for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1):
        launcher_signal(signum)


if __name__ == "__main__":
    main()
