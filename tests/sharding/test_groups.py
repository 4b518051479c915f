"""Groups of ranks that share a replica, where hosts come and go: the next larger ones that the ranks can form."""

from pathlib import Path

import pytest
from helpers.ranks import train_ranks
from helpers.small import small

from drumline.errors import ConfigError
from drumline.sharding.mesh import check_shard


@pytest.mark.parametrize(
    ("asked", "ranks", "taken"), [(4, 8, 4), (4, 2, 2), (4, 6, 6), (4, 10, 5), (3, 8, 4), (2, 3, 3), (8, 1, 1)]
)
def test_groups_are_as_asked_or_the_next_larger_that_divide_the_ranks(asked: int, ranks: int, taken: int) -> None:
    assert check_shard(asked, ranks, elastic=True) == taken
    if taken != asked:
        with pytest.raises(ConfigError, match=f"cannot be divided into groups of {asked}"):
            check_shard(asked, ranks)


def test_ranks_that_a_launcher_has_started_again_form_other_groups_and_say_so(here: Path) -> None:
    flags = small(*"--train_data_path text --global_batch_size 6 --batch_size 1 --run_dir run --shard 2".split())
    first, *others = train_ranks(3, *flags, environ={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert first.code == 0, first.err
    said = "shard  3 ranks cannot be divided as --shard 2 asks: sharded over all of them for now"
    assert first.out.splitlines().count(said) == 1 and not any(each.out for each in others)
