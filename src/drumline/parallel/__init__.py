"""Many ranks -> one gradient."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.parallel.agreement import compare, odd_ones, settings
    from drumline.parallel.attempt import Attempt
    from drumline.parallel.bitwise import SumTree, in_halves, row_squares
    from drumline.parallel.gpus import by_device, is_hopper, take_gpu
    from drumline.parallel.hardware import (
        allow_tf32,
        device_name,
        peak_flops,
        peak_memory_bytes,
        pick_device,
        pick_dtype,
        versions,
    )
    from drumline.parallel.heartbeat import ATTEMPT, PHASES, Pulse, own_pulse, waiting_for, working
    from drumline.parallel.place import find_place, slurm_hosts
    from drumline.parallel.stragglers import Pace, Stopwatch
    from drumline.parallel.strategies import Plain, Strategy, make_strategy
    from drumline.parallel.supervised import CHECKSUM, PROGRESS, TICK, TICK_AT, SupervisedPulse, reserve_record
    from drumline.parallel.world import Place, World, join, leave, own_place

__getattr__, __dir__, __all__ = public(__name__, __file__)
