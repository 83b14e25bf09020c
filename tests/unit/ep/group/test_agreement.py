"""Ranks that were not given the same are told so before they hang or answer wrongly."""

from eprt.ep.group.agreement import Difference, first_difference
from tests.gather_group import GatherGroup


class _Told(GatherGroup):
    """The rank 0 of a group whose others give these."""

    def __init__(self, *others):
        self.rank, self.size, self.others = 0, 1 + len(others), others

    def allgather(self, value):
        return [value, *self.others]

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def test_the_first_difference_names_value_and_rank():
    assert first_difference(_Told({"a": 1, "b": 2}, {"a": 1, "b": 2}), {"a": 1, "b": 2}) is None
    assert first_difference(_Told({"a": 1, "b": 2}, {"a": 1}), {"a": 1, "b": 2}) == Difference("b", 2, None, 2)
