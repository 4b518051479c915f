"""What a rank says of itself is read as it meant it, and a process that nobody supervises says nothing."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.elastic.watch import read_pulse, read_run_dir
from drumline.parallel.attempt import Attempt
from drumline.parallel.heartbeat import ATTEMPT, Pulse, own_pulse
from drumline.parallel.supervised import SupervisedPulse


@pytest.fixture(autouse=True)
def _own_pulse() -> Iterator[None]:
    yield
    own_pulse.cache_clear()


def fresh_pulse() -> Pulse:
    own_pulse.cache_clear()
    return own_pulse()


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


@pytest.fixture
def pulse(attempt: Attempt) -> Iterator[Pulse]:
    pulse = SupervisedPulse(attempt.folder)
    pulse.start(3)
    yield pulse
    pulse.stop()


def test_a_pulse_is_read_as_it_was_written_and_ticks_by_itself(attempt: Attempt) -> None:
    assert read_pulse(attempt, 3) is None
    pulse = SupervisedPulse(attempt.folder)
    pulse.start(3)
    try:
        pulse.at("compute", 12_345_678_901)
        first = read_pulse(attempt, 3)
        assert first is not None and (first.phase, first.step) == ("compute", 12_345_678_901)
        while (later := read_pulse(attempt, 3)) is not None and later.ticked_s == first.ticked_s:
            time.sleep(0.01)
        assert later is not None and later.progressed_s == first.progressed_s
    finally:
        pulse.stop()
    assert read_pulse(attempt, 3).phase == "ending"  # type: ignore[union-attr]


def test_a_process_that_nobody_supervises_has_no_thread_takes_no_signal_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ATTEMPT, raising=False)
    monkeypatch.chdir(tmp_path)
    threads, handler = {*threading.enumerate()}, signal.getsignal(signal.SIGUSR2)
    pulse = fresh_pulse()
    pulse.start(3)
    pulse.promise_an_ending()
    pulse.at("compute", 1)
    with pulse.waiting_for("the sum of the gradients"):
        pulse.still_there()
    pulse.tell_run_dir(tmp_path)
    pulse.stop()
    assert not pulse.is_supervised
    assert list(tmp_path.iterdir()) == []
    assert {*threading.enumerate()} <= threads and signal.getsignal(signal.SIGUSR2) == handler


def waits_for(attempt: Attempt) -> str:
    beat = read_pulse(attempt, 3)
    assert beat is not None
    return beat.waits_for


def test_the_outermost_says_what_a_rank_waits_for_and_its_own_work_is_no_waiting(
    attempt: Attempt, pulse: Pulse
) -> None:
    pulse.at("evaluate", 7)
    before = read_pulse(attempt, 3)
    with pulse.waiting_for("the comparison of the weights"):
        with pulse.waiting_for("word from the other ranks"):
            assert waits_for(attempt) == "the comparison of the weights"
        with pulse.waiting_for(""):
            assert waits_for(attempt) == ""
            with pulse.waiting_for("a sum"):
                assert waits_for(attempt) == "a sum"
        assert waits_for(attempt) == "the comparison of the weights"
    after = read_pulse(attempt, 3)
    assert before is not None and after is not None
    assert (after.phase, after.step, after.progressed_s) == ("evaluate", 7, before.progressed_s)  # no progress
    assert waits_for(attempt) == ""


def test_what_a_rank_waited_for_when_it_lost_its_peers_stays_until_it_goes_on(attempt: Attempt, pulse: Pulse) -> None:
    with pytest.raises(ConnectionError), pulse.waiting_for("the sum of the losses"):
        raise ConnectionError
    assert waits_for(attempt) == "the sum of the losses"
    pulse.at("exchange", 8, waits_for="the sum of the gradients")
    assert waits_for(attempt) == "the sum of the gradients"
    pulse.at("data", 8)
    assert waits_for(attempt) == ""


def test_a_text_that_is_too_long_is_cut(attempt: Attempt, pulse: Pulse) -> None:
    with pulse.waiting_for("ä" * 100):
        assert waits_for(attempt) == "ä" * 32


def test_a_record_is_never_read_half_written(attempt: Attempt, pulse: Pulse) -> None:
    done = threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            step += 1
            word = "abcdefgh"[step % 8]
            pulse.at(word * 16, step, waits_for=word * 64)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(3000):
            beat = read_pulse(attempt, 3)
            assert beat is not None
            if beat.phase != "starting":
                word = "abcdefgh"[beat.step % 8]
                assert (beat.phase, beat.waits_for) == (word * 16, word * 64)
    finally:
        done.set()
        thread.join()


def test_the_run_folder_that_rank_0_chose_is_known(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTEMPT, str(tmp_path))
    assert read_run_dir(attempt) is None
    fresh_pulse().tell_run_dir(tmp_path / "run")
    assert read_run_dir(attempt) == tmp_path / "run"


def test_a_rank_knows_whether_it_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    for number in (1, 2, 10):
        monkeypatch.setenv(ATTEMPT, str(Attempt.numbered(Path("/dev/shm/drumline-7-x"), number).folder))
        assert fresh_pulse().started_again == (number > 1)
    monkeypatch.delenv(ATTEMPT)
    assert not fresh_pulse().started_again
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert fresh_pulse().started_again
