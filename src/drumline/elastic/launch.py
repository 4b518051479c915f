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
from drumline.elastic.leader import Lease, RendezvousPoint
from drumline.elastic.rendezvous import HostsRendezvous, Rendezvous
from drumline.elastic.supervisor import Supervisor
from drumline.errors import RunLostError
from drumline.files import RunFolder
from drumline.network import is_free
from drumline.report import tell


def launch_training(config: TrainConfig, *, nproc: int) -> int:
    """Train with `nproc` ranks here; gives the exit code that a single process would."""
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
    lease = Lease(RunFolder(Path(config.run.run_dir)).leader) if config.run.run_dir else None
    point = RendezvousPoint(config.ranks.rdzv_endpoint, lease, say=logging.getLogger(__name__).warning)
    return HostsRendezvous(point, fewest=fewest, most=most)


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
    """Call a function as ranks 0 to nproc - 1 of one run; gives the exit code, having said what went wrong.

    max_restarts: how often they are started again when one dies; None: as often as needed while their steps go on
    hang_timeout: seconds without progress after which a rank that trains counts as dead
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
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say ourselves what went wrong
    # Ranks meet at a store that is new in each attempt: at that of the attempt before they may wait for ever.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    work = partial(function, *args)
    return Supervisor(work, rendezvous, nproc=nproc, max_restarts=max_restarts, limit_s=hang_timeout).run()


def _train_rank(config: TrainConfig) -> None:
    from drumline.train import train_here  # not needed by the process that only watches

    sys.exit(train_here(config))


def rendezvous_port(wanted: str | None) -> int:
    """The port the ranks meet at: MASTER_PORT if it is set and free, else any free one."""
    if not wanted:
        return 0
    if not is_free(int(wanted)):
        logging.getLogger(__name__).warning("MASTER_PORT %s is in use; using another port", wanted)
        return 0
    return int(wanted)
