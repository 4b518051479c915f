"""Many ranks -> one gradient."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.parallel.agreement import compare as compare
    from drumline.parallel.agreement import digest as digest
    from drumline.parallel.agreement import settings as settings
    from drumline.parallel.agreement import versions as versions
    from drumline.parallel.hardware import allow_tf32 as allow_tf32
    from drumline.parallel.hardware import is_hopper as is_hopper
    from drumline.parallel.hardware import peak_flops as peak_flops
    from drumline.parallel.hardware import peak_memory_bytes as peak_memory_bytes
    from drumline.parallel.hardware import pick_device as pick_device
    from drumline.parallel.hardware import pick_dtype as pick_dtype
    from drumline.parallel.heartbeat import ATTEMPT as ATTEMPT
    from drumline.parallel.heartbeat import Beat as Beat
    from drumline.parallel.heartbeat import Hang as Hang
    from drumline.parallel.heartbeat import Pulse as Pulse
    from drumline.parallel.heartbeat import Stacks as Stacks
    from drumline.parallel.heartbeat import Watch as Watch
    from drumline.parallel.heartbeat import attempt_name as attempt_name
    from drumline.parallel.heartbeat import die_with_parent as die_with_parent
    from drumline.parallel.heartbeat import has_promised_an_ending as has_promised_an_ending
    from drumline.parallel.heartbeat import is_supervised as is_supervised
    from drumline.parallel.heartbeat import promise_an_ending as promise_an_ending
    from drumline.parallel.heartbeat import read_pulse as read_pulse
    from drumline.parallel.heartbeat import read_run_dir as read_run_dir
    from drumline.parallel.heartbeat import started_again as started_again
    from drumline.parallel.heartbeat import tell_run_dir as tell_run_dir
    from drumline.parallel.heartbeat import under_torchrun as under_torchrun
    from drumline.parallel.stragglers import Pace as Pace
    from drumline.parallel.stragglers import Stopwatch as Stopwatch
    from drumline.parallel.strategies import Backward as Backward
    from drumline.parallel.strategies import Plain as Plain
    from drumline.parallel.strategies import Strategy as Strategy
    from drumline.parallel.strategies import Votes as Votes
    from drumline.parallel.strategies import make_strategy as make_strategy
    from drumline.parallel.strategies import message as message
    from drumline.parallel.world import Place as Place
    from drumline.parallel.world import World as World
    from drumline.parallel.world import find_place as find_place
    from drumline.parallel.world import join as join
    from drumline.parallel.world import leave as leave
    from drumline.parallel.world import slurm_hosts as slurm_hosts

__getattr__, __dir__, __all__ = public(__name__, __file__)
