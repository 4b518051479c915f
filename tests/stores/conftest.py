"""An object store for the tests here, and what finds it."""

from collections.abc import Iterator

import pytest
from helpers.object_store import ObjectStore


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with ObjectStore() as made:
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        yield made
