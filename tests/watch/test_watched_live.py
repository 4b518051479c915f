"""A real run on two ranks, followed live in a browser while one of them is killed and the run recovers."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers.browser import opened
from helpers.launchers import rank_process
from helpers.small import small
from helpers.warm import Warm

TIMEOUT_S = 120
READY = "document.documentElement.dataset.ready === '1'"
STEP = "Number(document.querySelector('#tile-step .value').textContent.replaceAll(',', ''))"


@pytest.mark.needs_shm
@pytest.mark.long
def test_a_run_whose_rank_is_killed_is_followed_live_with_every_event(tmp_path: Path, text: Path) -> None:
    flags = small(
        "--train_data_path", str(text), "--global_batch_size", "16", "--total_steps", "1000000", "--log_every", "50"
    )
    words = [sys.executable, "-m", "drumline", "train", "--nproc", "2", "--watch", *flags, "--run_dir", "run"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Warm(words, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = next(match[1] for line in process.stdout if (match := re.search(r" at (http://\S+)", line)))
        with opened(address) as page:
            page.wait_for(
                f"{READY} && Number(document.querySelector('#tile-step .value').textContent.replace(',', '')) > 9"
            )
            events = "document.getElementById('events').textContent"
            page.wait_for(f"{events}.includes('started') && {events}.includes('2 ranks')")
            page.wait_for("document.getElementById('timeline-body').textContent.includes('snapshot')")
            rank_process(process.pid, 1).kill()
            page.wait_for(f"{events}.includes('SIGKILL') && {events}.includes('resumed')")
            shown = page.text("#events")
            assert "rank 1" in shown and shown.index("resumed") < shown.index("SIGKILL") < shown.index("started")
            before = page.evaluate(STEP)
            page.wait_for(
                f"Number(document.querySelector('#tile-step .value').textContent.replaceAll(',', '')) > {before}"
            )
            page.wait_for("document.querySelectorAll('#rank-lanes').length === 1")
            assert page.errors == [] and page.strangers() == []
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75, err
    recorded = [json.loads(line)["event"] for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    rest = [each for each in recorded if each not in ("saved", "snapshot", "stalled")]
    assert rest == ["started", "restart", "resumed", "stopped"]
    with pytest.raises(urllib.error.URLError):  # the page ends with the command that has started it
        urllib.request.urlopen(address, timeout=10)
