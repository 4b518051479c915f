"""Whose copies are on which host."""

from hypothesis import given
from hypothesis import strategies as st

from drumline.snapshots.remote import route


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 6), st.randoms())
def test_each_slot_is_in_the_memory_of_as_many_hosts_as_asked_for(sizes: list[int], copies: int, draw) -> None:  # type: ignore[no-untyped-def]
    ranks = list(range(sum(sizes)))
    draw.shuffle(ranks)
    hosts = [sorted(ranks[sum(sizes[:at]) : sum(sizes[: at + 1])]) for at in range(len(sizes))]
    routes = {rank: route(hosts, rank, copies) for rank in ranks}
    for rank, way in routes.items():
        assert len(way.targets) == min(copies, len(hosts)) - 1
        assert all(rank in routes[target].sources for target in way.targets)
        places = [next(at for at, each in enumerate(hosts) if target in each) for target in (rank, *way.targets)]
        assert len(set(places)) == len(places)
    for own in hosts:
        parts = [*range(len(own)), *(part for rank in own for part in routes[rank].sources.values())]
        assert sorted(parts) == list(range(routes[own[0]].parts))
        assert {routes[rank].parts for rank in own} == {len(parts)}
