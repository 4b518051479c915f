"""The secret of a run: where it comes from, and what is proved with it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.network.secret import SECRET, SECRET_FILE, derived, new_secret, run_secret, signed, verified

KEY = new_secret()


def test_the_variable_comes_before_the_files(tmp_path: Path) -> None:
    named, own = tmp_path / "named", tmp_path / "own"
    given = {SECRET: KEY, SECRET_FILE: str(named)}
    assert run_secret(given, own) == KEY.encode() and not named.exists() and not own.exists()
    from_named = run_secret({SECRET_FILE: str(named)}, own)
    assert from_named.decode() == named.read_text().strip() and not own.exists()
    assert run_secret({}, None) == b""


def test_the_first_host_writes_the_file_for_its_user_alone_and_all_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".leader" / "secret"
    with multiprocessing.get_context("fork").Pool(4) as hosts:
        found = hosts.starmap(run_secret, [({}, path)] * 16)
    assert len(set(found)) == 1 and len(found[0]) == 64
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_secret_that_is_short_empty_or_unreadable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"DRUMLINE_SECRET has 5 characters; a secret needs 32 or more") as refused:
        run_secret({SECRET: "hello"}, None)
    assert "openssl rand -hex 32" in refused.value.fix and "hello" not in str(refused.value)
    monkeypatch.setattr("drumline.network.secret._WRITTEN_S", 0.0)
    empty = tmp_path / "empty"
    empty.touch(0o600)
    with pytest.raises(ConfigError, match="has 0 characters"):
        run_secret({}, empty)
    with pytest.raises(ConfigError, match="cannot read the secret of the run in"):
        run_secret({}, tmp_path)


def test_a_file_that_others_can_read_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.write_text(KEY)
    os.chmod(path, 0o644)
    assert run_secret({}, path) == KEY.encode()
    assert f"chmod 600 {path}" in caplog.text and KEY not in caplog.text


@given(st.text(max_size=20), st.text(max_size=40), st.data())
def test_what_is_signed_counts_under_its_name_only_and_unaltered(name: str, text: str, data: st.DataObject) -> None:
    content = signed(KEY, name, text)
    assert verified(KEY, name, content) == text
    place = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.characters(exclude_characters=content[place], exclude_categories=["Cs"]))
    for secret, where, what in [
        (KEY, name, content[:place] + other + content[place + 1 :]),
        (KEY, name, content[:place]),
        (KEY, name, text),
        (KEY, name + "/", content),
        (KEY, name + text[:1], content[:64] + text[1:]) if text else (KEY, "", ""),
        (new_secret(), name, content),
    ]:
        with pytest.raises(ValueError, match="was not written with the run's secret"):
            verified(secret, where, what)


def test_without_a_secret_nothing_is_signed() -> None:
    assert derived(b"", "ranks") == "" and signed("", "name", "text") == verified("", "name", "text") == "text"
    assert len({derived(KEY.encode(), "one"), derived(KEY.encode(), "other"), KEY}) == 3
