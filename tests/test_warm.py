"""The tests' own way to start a command."""

import sys

import pytest
from helpers.warm import Warm


def test_a_test_that_fails_or_is_skipped_does_not_wait_for_what_it_has_started() -> None:
    forever = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(pytest.skip.Exception), Warm(forever) as process:
        pytest.skip("as where there is no browser")
    assert process.returncode == -9
