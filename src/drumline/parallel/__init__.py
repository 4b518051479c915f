"""Many ranks -> one gradient."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.parallel.agreement import compare, odd_ones, settings
    from drumline.parallel.attempt import (
        ATTEMPT,
        Attempt,
        is_supervised,
        promise_an_ending,
        started_again,
        tell_run_dir,
    )
    from drumline.parallel.hardware import allow_tf32, is_hopper, peak_flops, peak_memory_bytes, pick_device, pick_dtype
    from drumline.parallel.heartbeat import CHECKSUM, PROGRESS, TICK, TICK_AT, Pulse, own_pulse, waiting_for, working
    from drumline.parallel.place import find_place, slurm_hosts
    from drumline.parallel.software import digest, versions
    from drumline.parallel.stragglers import Pace, Stopwatch
    from drumline.parallel.strategies import Plain, Strategy, make_strategy
    from drumline.parallel.world import Place, World, join, leave

__getattr__, __dir__, __all__ = public(__name__, __file__)
