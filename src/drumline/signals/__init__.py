"""A signal -> a process that stops in order.

The only place that handles signals; each kind of process in its own way:

    process                 first signal                           another one of the same kind
    the train command       exits immediately (`end_at_once`)
    while tokenizing text   KeyboardInterrupt, so that it cleans   the same
                            up (`raise_interrupts`)
    the training loop       stops after this step, with all saved  exits immediately; ignored under a supervisor,
                            (`stopping`)                           which kills ranks that do not stop
    a supervisor, `launch`  asks its ranks or hosts to stop        kills them (`counting`)
    `serve`                 answers what was asked before          exits without that (`counting`)

A process started by nohup continues without its terminal: if SIGHUP is ignored, it stays ignored.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.signals.handling import STOP_SIGNALS, end_at_once, in_background, raise_interrupts, raising, stopping
    from drumline.signals.launching import SHOW_STACKS, blocked, counting, show_stacks, start_afresh

__getattr__, __dir__, __all__ = public(__name__, __file__)
