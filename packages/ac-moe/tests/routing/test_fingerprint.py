import torch
from hypothesis import given
from hypothesis import strategies as st

from ac_moe.routing.fingerprint import routing_checksum, routing_numbers

EXPERTS = 8


@given(st.lists(st.integers(0, 7), min_size=2, max_size=24), st.data())
def test_checksum_tells_any_two_routings_apart(ids: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(ids))
    one, two = (routing_checksum(torch.tensor(x).view(-1, 1), EXPERTS).item() for x in (ids, other))
    assert (one == two) == (ids == other)
    assert routing_checksum(torch.tensor(ids, dtype=torch.int32).view(-1, 1), EXPERTS).item() == one


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.data())
def test_checksum_of_maps(rows: list[list[bool]], data: st.DataObject) -> None:
    other = data.draw(st.permutations(rows))
    one, two = (routing_checksum(torch.tensor(x), 4).item() for x in (rows, other))
    assert (one == two) == (rows == other)


def test_numbers() -> None:
    ids = torch.tensor([[3, 0], [3, 1]])
    routing_map = torch.zeros(2, 4, dtype=torch.bool).scatter(1, ids, True)
    for routing in (ids, ids.int(), routing_map):
        assert routing_numbers(routing, 4, checksum=False).tolist() == [2, 0, 1, 1, 0, 2]
        tokens, checksum, *counts = routing_numbers(routing, 4, checksum=True).tolist()
        assert (tokens, counts) == (2, [1, 1, 0, 2])
        assert checksum == routing_checksum(routing, 4).item() != 0
    assert routing_numbers(ids[:0], 4, checksum=True).tolist() == [0, 0, 0, 0, 0, 0]
