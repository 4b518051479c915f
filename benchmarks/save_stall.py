"""How long training stands still for a checkpoint, against a blocking torch.save of the same state, in one run.

    python benchmarks/save_stall.py [--preset gpt2] [--repeat 5] [--device cpu]

Target: at most 1/5. The memory that is copied into is made ready by a thread after the first step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from header import header

from drumline.checkpoint.checkpoints import RunState
from drumline.checkpoint.retention import Retention
from drumline.checkpoint.saver import Saver
from drumline.checkpoint.snapshots import Snapshots
from drumline.checkpoint.state import tensors_of
from drumline.config.model import ModelSettings
from drumline.config.presets import gpt_config, with_preset
from drumline.config.settings import OptimConfig, TrainConfig
from drumline.files.run_folder import RunFolder
from drumline.model.gpt import GPT
from drumline.optim.optimizers import make_optimizer
from drumline.parallel.world import Place, World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    header()
    device = torch.device(arguments.device)
    config = with_preset(TrainConfig(model=ModelSettings(preset=arguments.preset), optim=OptimConfig(lr=1e-4)))
    model = GPT(gpt_config(config.model, vocab_size=50304)).to(device)
    optimizer = make_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    size = sum(tensor.nbytes for tensor in tensors_of(model, optimizer).values())
    stalls, blocking, written = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.checkpoints.mkdir()

        def tell(message: str, event: dict[str, object]) -> None:
            if event["event"] != "saved":
                raise SystemExit(message)

        saver = Saver(
            run,
            World(Place(), device),
            model,
            optimizer,
            retention=Retention(),
            snapshots=Snapshots(run.path / "memory", run),
            takes_snapshots=False,
            about={},
            tell=tell,
        )
        saver.poll()  # as after the first step: it makes its memory ready
        for step in range(arguments.repeat + 1):
            start = time.perf_counter()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "blocking.pt")
            blocking.append(time.perf_counter() - start)
            start = time.perf_counter()
            saver.save(RunState(step=step, facts={}))
            stalls.append(time.perf_counter() - start)
            saver.wait()
            written.append(time.perf_counter() - start)
        saver.close()
    print(f"state of {arguments.preset} with AdamW on {device.type}: {size / 1e9:.2f} GB, {arguments.repeat} saves")
    print(f"blocking torch.save        {median(blocking[1:]):7.3f} s")
    print(f"drumline, training stalls  {median(stalls[1:]):7.3f} s (the first one {stalls[0]:.3f} s)")
    print(f"on disk and verified after {median(written[1:]):7.3f} s, in the background")
    print(f"memory for it              {size / 1e9:7.2f} GB")
    print(f"stall / blocking           {median(stalls[1:]) / median(blocking[1:]):7.3f} (target: at most 0.2)")


if __name__ == "__main__":
    main()
