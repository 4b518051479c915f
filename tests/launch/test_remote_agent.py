"""The remote agent of an SSH launch by itself: it ends when it should, and takes everything along."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest
from helpers.sshd import LIMIT_S, wait


def agent(**order: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "drumline.launch.remote_agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"environ": {}, "cwd": "/", "silent_s": 1000, **order}).encode() + b"\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith(b'\x1edrumline {"started": ')
    return process


TRAPS = 'trap "echo saved; exit 75" TERM; echo ready; while :; do sleep 0.1; done'


@pytest.mark.parametrize("how", ["TERM", "closed", "silent", "signal"])
def test_the_remote_agent_lets_its_command_save_when_asked_or_when_nobody_is_there_to_ask(how: str) -> None:
    process = agent(argv=["sh", "-c", TRAPS], silent_s=5 if how == "silent" else 1000)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    if how == "TERM":
        process.stdin.write(b"\nTERM\nTERM\n")
        process.stdin.flush()
    elif how == "closed":
        process.stdin.close()
        process.stdin = None
    elif how == "signal":
        process.terminate()
    assert process.wait(LIMIT_S) == 75
    assert process.stdout.read() == b'saved\n\x1edrumline {"code": 75}\n'
    process.communicate()


def test_the_remote_agent_kills_its_command_and_all_that_it_started_when_told_so() -> None:
    process = agent(argv=["sh", "-c", f"setsid sh -c '{TRAPS}' & {TRAPS}"])
    assert process.stdin is not None and process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    mine = psutil.Process(process.pid).children(recursive=True)
    process.stdin.write(b"KILL\n")
    process.stdin.flush()
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL and len(mine) >= 2
    assert not [child for child in mine if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    process.communicate()


def test_what_a_command_leaves_behind_ends_with_it() -> None:
    process = agent(argv=["sh", "-c", "setsid sleep 1000 & exit 7"])
    assert process.wait(LIMIT_S) == 7
    out, _ = process.communicate()  # returns only once nobody holds the pipe any more
    assert out == b'\x1edrumline {"code": 7}\n'


def test_a_remote_agent_that_is_killed_takes_its_command_along() -> None:
    process = agent(argv=["sh", "-c", "echo ready; exec sleep 1000"])
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    wait(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the end of its command")
