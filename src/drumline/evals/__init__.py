"""A checkpoint -> results of tasks.

scoring: log-likelihoods of continuations, in batches (together: by all
ranks, of a sharded model). generating: text until a stop string, in batches. items: tasks
made from held-out text. builtin: their results, also during training. harness: tasks of lm-evaluation-harness. results:
where results go. running: the tasks of one command.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.evals.builtin import data_for_tasks, with_task_formats, with_tasks
    from drumline.evals.results import Result, rows_of
    from drumline.evals.running import TaskSettings, evaluate_tasks

__getattr__, __dir__, __all__ = public(__name__, __file__)
