"""Many ranks -> one gradient."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.parallel.agreement import compare, digest, settings, versions
    from drumline.parallel.hardware import allow_tf32, is_hopper, peak_flops, peak_memory_bytes, pick_device, pick_dtype
    from drumline.parallel.heartbeat import (
        ATTEMPT,
        Beat,
        Hang,
        Pulse,
        Stacks,
        Watch,
        attempt_name,
        die_with_parent,
        has_promised_an_ending,
        is_supervised,
        promise_an_ending,
        read_pulse,
        read_run_dir,
        started_again,
        tell_run_dir,
        under_torchrun,
    )
    from drumline.parallel.stragglers import Pace, Stopwatch
    from drumline.parallel.strategies import Backward, Plain, Strategy, Votes, make_strategy, message
    from drumline.parallel.world import Place, World, find_place, join, leave, slurm_hosts

__getattr__, __dir__, __all__ = public(__name__, __file__)
