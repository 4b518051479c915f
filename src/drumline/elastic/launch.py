"""Start the ranks of a run on this host."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from drumline.config import TrainConfig
from drumline.elastic.supervisor import Supervisor
from drumline.errors import RunLostError
from drumline.files import RunFolder
from drumline.network import SECRET, is_free, run_secret
from drumline.rendezvous import HostsRendezvous, Lease, Rendezvous, RendezvousPoint
from drumline.report import tell


def launch_training(config: TrainConfig, *, nproc: int) -> int:
    """Train with `nproc` ranks on this host; returns the exit code that a single process would."""
    ranks = config.ranks
    return _supervise(
        _train_rank,
        (config,),
        _rendezvous(config),
        nproc=nproc,
        max_restarts=ranks.max_restarts,
        hang_timeout=ranks.hang_timeout,
    )


def _rendezvous(config: TrainConfig) -> Rendezvous:
    fewest, most = config.ranks.hosts
    if most == 1:
        return _alone()
    endpoint = config.ranks.rdzv_endpoint
    folder = RunFolder(Path(config.run.run_dir)).leader if config.run.run_dir else None
    # Where hosts meet at an endpoint, this folder may be another one on each of them.
    secret = run_secret(os.environ, folder / "secret" if folder and not endpoint else None)
    say = logging.getLogger(__name__).warning
    if endpoint and not secret:
        say(
            "anyone who can reach %s can take part in this run: set the same %s on every host"
            " (openssl rand -hex 32 makes one), or give no --rdzv_endpoint if all hosts share --run_dir",
            *(endpoint, SECRET),
        )
    point = RendezvousPoint(endpoint, Lease(folder) if folder else None, secret, hosts=(fewest, most), say=say)
    return HostsRendezvous(point, elastic=fewest < most)


def _alone() -> Rendezvous:
    return Rendezvous(rendezvous_port(os.environ.get("MASTER_PORT")))


def start_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    nproc: int,
    max_restarts: int | None = 0,
    hang_timeout: float | None = None,
) -> int:
    """Call a function as ranks 0 to nproc - 1 of one run, report errors, and return the exit code.

    max_restarts: number of restarts after a rank dies; None: unlimited while the run makes progress
    hang_timeout: seconds without progress after which a training rank counts as hung
    """
    try:
        return _supervise(function, args, _alone(), nproc=nproc, max_restarts=max_restarts, hang_timeout=hang_timeout)
    except RunLostError as error:
        tell(error)
        return error.exit_code


def _supervise(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rendezvous: Rendezvous,
    *,
    nproc: int,
    max_restarts: int | None,
    hang_timeout: float | None,
) -> int:
    work = partial(function, *args)
    return Supervisor(work, rendezvous, nproc=nproc, max_restarts=max_restarts, limit_s=hang_timeout).run()


def _train_rank(config: TrainConfig) -> None:
    from drumline.train import train_here  # not needed by the supervisor

    sys.exit(train_here(config))


def rendezvous_port(wanted: str | None) -> int:
    """The rendezvous port of the ranks: MASTER_PORT if it is set and free, else any free port."""
    if not wanted:
        return 0
    if not is_free(int(wanted)):
        logging.getLogger(__name__).warning("MASTER_PORT %s is in use; using another port", wanted)
        return 0
    return int(wanted)
