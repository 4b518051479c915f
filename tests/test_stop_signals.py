"""One list of stop signals, handled in one module: by each kind of process in a way of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import drumline
from drumline import signals
from drumline.errors import EXIT_INTERRUPTED

PACKAGE = Path(drumline.__file__).parent


def handlers() -> list[object]:
    return [signal.getsignal(signum) for signum in signals.STOP_SIGNALS]


@pytest.fixture(autouse=True)
def defaults() -> None:
    assert signal.SIG_IGN not in handlers()


def test_no_other_module_lists_stop_signals_or_handles_signals() -> None:
    handles = re.compile(r"signal\.signal\(|pthread_sigmask|faulthandler\.register|set_wakeup_fd")
    lists = re.compile(r"SIG(TERM|INT|USR1|HUP),\s*signal\.SIG")
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.parent != PACKAGE / "signals":
            assert not handles.search(text), path
            assert path.parent.name == "drill" or not lists.search(text), path


@pytest.mark.parametrize("signum", signals.STOP_SIGNALS)
def test_the_loop_is_asked_once_and_the_second_signal_does_what_it_did_before(signum: signal.Signals) -> None:
    before = handlers()
    with signals.counting() as outer, signals.stopping(supervised=False) as stop:
        assert not stop.is_set()
        signal.raise_signal(signum)
        assert stop.is_set() and outer == []
        signal.raise_signal(signum)
        assert outer == [signum]
    assert handlers() == before


def test_the_first_ctrl_c_says_at_once_that_it_saves_and_how_to_force_it(capfd: pytest.CaptureFixture[str]) -> None:
    for supervised in (True, False):  # a launcher says it for all of its ranks
        with signals.stopping(supervised=supervised):
            signal.raise_signal(signal.SIGINT)
        said = capfd.readouterr().err
        assert ("saving after this step" in said and "press Ctrl-C again" in said) != supervised


@pytest.mark.parametrize("signum", signals.STOP_SIGNALS)
def test_a_supervised_loop_ignores_the_second_signal(signum: signal.Signals) -> None:
    before = handlers()
    with signals.counting() as outer, signals.stopping(supervised=True) as stop:
        signal.raise_signal(signum)
        signal.raise_signal(signum)
        assert stop.is_set() and outer == []
    assert handlers() == before


@pytest.mark.parametrize("signum", signals.STOP_SIGNALS)
def test_where_there_are_files_to_tidy_up_a_signal_is_a_keyboard_interrupt(signum: signal.Signals) -> None:
    before = handlers()
    with pytest.raises(KeyboardInterrupt), signals.raising():
        signal.raise_signal(signum)
    assert handlers() == before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.counting() as outer, signals.stopping(supervised=False) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert outer == [] and not stop.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_a_thread_no_signal_is_handled_and_the_work_goes_on() -> None:
    done = []

    def work() -> None:
        with signals.stopping(supervised=False) as stop, signals.counting(), signals.raising():
            done.append(stop.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [False]


@pytest.mark.parametrize("signum", signals.STOP_SIGNALS)
@pytest.mark.parametrize("then", ["", "signals.raise_interrupts(); "])
def test_a_command_ends_at_once_until_it_has_files_to_tidy_up(signum: signal.Signals, then: str) -> None:
    code = f"import signal; from drumline import signals; signals.end_at_once(); {then}signal.raise_signal({signum})"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    if then:
        assert "KeyboardInterrupt" in ended.stderr
    else:
        assert ended.returncode == EXIT_INTERRUPTED
        assert ended.stderr == "error: interrupted\n  fix: run the same command again\n"


@pytest.mark.parametrize("signum", [signum for signum in signals.STOP_SIGNALS if signum != signal.SIGINT])
def test_a_fork_of_a_server_that_blocks_signals_dies_of_them_like_a_program_of_its_own(signum: signal.Signals) -> None:
    with signals.counting(), signals.blocked():
        pid = os.fork()
        if pid == 0:
            signals.start_afresh()
            os.kill(os.getpid(), signum)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signum
