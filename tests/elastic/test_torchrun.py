"""Under torchrun, ranks make up for what it leaves open."""

import os
import signal
import subprocess
import sys

from drumline.elastic.torchrun import under_torchrun
from drumline.parallel.heartbeat import ATTEMPT


def test_under_torchrun_a_rank_dies_with_it_and_says_what_torchrun_leaves_open() -> None:
    assert under_torchrun({"RANK": "0"}) == []
    assert under_torchrun({"TORCHELASTIC_RUN_ID": "1", ATTEMPT: "/x"}) == []
    code = "from drumline.elastic import under_torchrun; print(under_torchrun(), flush=True); input()"
    agent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    variables = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "SLURM_JOB_ID": "7"}
    variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}  # a launcher in this very process sets it
    with subprocess.Popen(
        [sys.executable, "-c", agent],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said and "--signals-to-handle" in said
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == ""  # the pipe closes when the last one that has it is gone
