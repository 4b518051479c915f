"""Starts the ranks of this machine, watches them, and restarts them after a failure.

`launch` is the entry point. `supervisor` runs one attempt after another: room `rendezvous` tells which hosts take part,
`rank_process` forks the ranks, `scratch` makes the folder of their heartbeats, `watch` reads these, `diagnosis` finds
the first cause, `deleted` keeps the name of a run whose folder is gone. The protocol between supervisor and ranks is
described in `parallel/attempt.py`.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.elastic.launch import launch_training, start_ranks
    from drumline.elastic.lifetime import die_with_parent
    from drumline.elastic.rank_process import start_server
    from drumline.elastic.scratch import newest_attempt
    from drumline.elastic.torchrun import under_torchrun
    from drumline.elastic.watch import Beat, read_pulse

__getattr__, __dir__, __all__ = public(__name__, __file__)
