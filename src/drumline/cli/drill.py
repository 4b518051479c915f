"""`drumline drill`: inject faults into a small run."""

from __future__ import annotations

from pathlib import Path

from drumline.errors import EXIT_FAILED


def drill(
    *,
    faults: str = "kill,crash,stop,term,disk,corrupt,nan,host",
    minutes: float = 2.0,
    ranks: int = 2,
    seed: int = 0,
    folder: Path = Path("runs/drill"),
) -> int:
    """Inject faults into a small run repeatedly and verify that no work is lost.

    Parameters
    ----------
    faults
        Faults to inject, as kill,nan. stop freezes a rank, term sends SIGTERM, host kills a host.
    minutes
        Duration, not counting the reference run without faults.
    ranks
        Number of ranks.
    seed
        Random seed; the same seed injects the same faults.
    folder
        Folder for the runs and for drill.json, the results.
    """
    from drumline.drill import COLUMNS, DrillConfig, conclusion, fault_rows, parse_faults, run_drill
    from drumline.report import print_table

    config = DrillConfig(faults=parse_faults(faults), minutes=minutes, ranks=ranks, seed=seed, folder=folder)
    report = run_drill(config, say=lambda text: print(text, flush=True))
    print_table(COLUMNS, fault_rows(report))
    print("\n".join(conclusion(report)))
    return 0 if report.passed else EXIT_FAILED
