"""Tables as plain text."""

from eprt.balancer.commands.tables import table


def test_columns_are_aligned_and_missing_cells_empty():
    rows = [{"plan": "a", "x": 1.23456, "n": 10}, {"plan": "longer", "n": 7, "late": "yes"}]
    assert table(rows).splitlines() == [
        "plan        x   n  late",
        "a       1.235  10",
        "longer          7   yes",
    ]
