"""What fp8 costs in loss and gains in speed: 500 steps of the 124M modern preset with AdamW, in fp8 and in bfloat16.

    python benchmarks/fp8_loss.py --data FOLDER     # about 2 minutes on an H200
    python benchmarks/fp8_loss.py --miniature       # every line of it on a CPU, without fp8, to see that it works

Both are the command itself, `drumline train` with `--fp8` and without: the same first weights, the same real text in
the same order, 32 x 1024 tokens a step, the classic recipe with a peak rate of 1.5e-3 after 50 steps. Compared are the
mean training loss of the last 50 steps, and the loss over all validation text after the last. FOLDER, and how the time
of the steps is taken: as in recipe_gpu.py. Several seeds show how far apart runs are that differ in nothing else.
"""

import statistics
from collections.abc import Sequence
from functools import partial

from recipe_gpu import Report, Trained, attempt, benching, common_arguments, seeds_of, train

RECIPE = "--preset modern --recipe classic --lr 0.0015 --warmup_steps 50"
TARGET = 0.005


def verdict(fp8: Sequence[Trained], bf16: Sequence[Trained]) -> str:
    """Losses and speed of one against the other, each the mean over the seeds."""
    lines = ["| format | training loss, last 50 steps | validation loss | tokens/s |\n| --- | --- | --- | --- |"]
    train_losses = [statistics.fmean(run.train_loss for run in runs) for runs in (fp8, bf16)]
    valid_losses = [statistics.fmean(run.valid_loss for run in runs) for runs in (fp8, bf16)]
    speeds = [statistics.fmean(run.tokens / run.seconds for run in runs) for runs in (fp8, bf16)]
    for name, *figures in zip(("fp8", "bfloat16"), train_losses, valid_losses, speeds, strict=True):
        lines.append("| {} | {:.4f} | {:.4f} | {:,.0f} |".format(name, *figures))
    ratios = [part[0] / part[1] for part in (train_losses, valid_losses, speeds)]
    outcome = "met" if max(ratios[:2]) <= 1.0 + TARGET else "MISSED"
    lines.append("| ratio | {:.4f} | {:.4f} | {:.3f} |".format(*ratios))
    return "\n".join([*lines, f"loss within {TARGET:.1%} of bfloat16's: {outcome}"])


def main() -> None:
    parser = common_arguments(__doc__ or "", steps=500, batch_size=32, seeds="0")
    arguments = parser.parse_args()
    if arguments.miniature:
        arguments.steps, arguments.batch_size = 80, 8
    with benching(arguments, f"{RECIPE} --batch_size {arguments.batch_size}") as bench:
        flags = {"fp8": "" if arguments.miniature else "--fp8", "bfloat16": ""}
        report = Report(arguments.json, arguments)
        runs: dict[str, list[Trained]] = {name: [] for name in flags}
        for seed in seeds_of(arguments):
            for name, flag in flags.items():
                run = partial(train, bench, f"{name}, seed {seed}", f"--seed {seed} {flag}", steps=arguments.steps)
                trained = attempt(run)
                report.add(trained)
                runs[name] += [trained] if trained else []
        if all(runs.values()):
            report.conclude(verdict(runs["fp8"], runs["bfloat16"]))


if __name__ == "__main__":
    main()
