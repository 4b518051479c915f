"""The command line of `drumline checkpoint`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

checkpoint = App(name="checkpoint", help="List, verify, export or prune the checkpoints of a run.")


@checkpoint.command(name="list")
def list_(run: str, /) -> int:
    """List the checkpoints of a run: step, time, size, validation loss, and why each is kept.

    Parameters
    ----------
    run
        Run folder, or the URL of a run in an object store (its --checkpoint_store).
    """
    from drumline.checkpoint import list_checkpoints
    from drumline.report import print_checkpoints

    if "://" in run:
        from drumline.stores import stored_checkpoints

        print_checkpoints(stored_checkpoints(run))
    else:
        print_checkpoints(list_checkpoints(Path(run)))
    return 0


@checkpoint.command
def verify(run: Path, /, *, step: int | None = None) -> int:
    """Check every file against its hash; exit code 1 if a checkpoint is damaged. Changes nothing.

    Those that the run has set aside are listed, too; it does not use them any more.

    Parameters
    ----------
    run
        Run folder.
    step
        Check only the checkpoint of this step.
    """
    from drumline.checkpoint import set_aside_checkpoints, verify_checkpoints
    from drumline.report import print_line

    whole = True
    for path, problem in verify_checkpoints(run, step=step):
        print_line(f"{path}: ok" if problem is None else problem)
        whole = whole and problem is None
    for path, why in set_aside_checkpoints(run, step=step):
        print_line(f"{path}: {why}, not used; to delete it: drumline checkpoint prune {run}")
    return 0 if whole else 1


@checkpoint.command
def export(
    run: Path,
    /,
    *,
    step: int | None = None,
    out: Path | None = None,
    force: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Export a checkpoint as a single .pt file that `drumline train --resume_from` can read.

    Parameters
    ----------
    run
        Run folder.
    step
        Step of the checkpoint. Default: the newest valid one.
    out
        Output file, or an existing folder for it. Default: RUN/checkpoints/checkpoint_step_N.pt.
    force
        Overwrite an existing file.
    """
    from drumline.checkpoint import export_checkpoint
    from drumline.files import RunFolder
    from drumline.report import command, print_line
    from drumline.units import count

    chosen, file, damaged = export_checkpoint(run, step=step, out=out, force=force)
    for problem in damaged:
        print_line(f"warning: {problem}; using {chosen.path.name} instead")
    print_line(f"wrote {file}: step {chosen.step:,}, {count(file.stat().st_size)}B")
    if RunFolder(run).trainer.exists():
        print_line(f"to resume from it, in the script: Trainer(..., resume_from={str(file)!r})")
    else:
        print_line(f"to resume from it:\n  {command('train', '--run_dir', run, '--resume_from', file)}")
    return 0


@checkpoint.command
def prune(
    run: Path,
    /,
    *,
    keep: int | None = None,
    keep_every: int | None = None,
    keep_best: bool | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Delete all checkpoints except those to keep. Damaged, superseded and incomplete ones are deleted too.

    The newest valid checkpoint is always kept.

    Parameters
    ----------
    run
        Run folder.
    keep
        Number of checkpoints to keep. Default: the run's keep_checkpoints.
    keep_every
        Also keep every checkpoint whose step is a multiple of this. Default: the run's.
    keep_best
        Also keep the checkpoint with the lowest validation loss. Default: the run's.
    dry_run
        Print what would be deleted, without deleting it.
    """
    from drumline.checkpoint import prune_checkpoints
    from drumline.report import print_line
    from drumline.units import count

    pruned = prune_checkpoints(run, keep=keep, keep_every=keep_every, keep_best=keep_best, dry_run=dry_run)
    for problem in pruned.damaged:
        print_line(f"warning: {problem}")
    for path, size_bytes in pruned.gone.items():
        print_line(f"{'would delete' if dry_run else 'deleted'} {path} ({count(size_bytes)}B)")
    total_bytes = sum(pruned.gone.values())
    print_line(f"{len(pruned.gone)} {'to delete' if dry_run else 'deleted'}, {total_bytes:,} bytes")
    return 0
