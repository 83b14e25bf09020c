"""Another tool's analysis on eprt's logs: what it is given, and how its answers are counted."""

import numpy as np
import pytest

from benchmarks.diagnosis.deepxtrace import gathered, is_right, load_tool, places_named
from benchmarks.diagnosis.serving_job import ServingFault, ServingJob, play_records


def test_it_is_given_totals_by_rank_and_phase():
    records = play_records(ServingJob(4, "steady", 0, num_windows=3))
    stats = gathered(records)
    assert stats.shape == (3, 4, 2, 4) and stats.dtype == np.int64
    assert stats[1, 2, 1].tolist() == [int(us) for us in records[1 * 4 + 2].combine_wait_us]


def test_a_place_counts_that_is_named_in_two_windows():
    answers = iter(range(100))

    def analyse(matrix):
        call = next(answers)
        columns = [[2, 1.0, 4.0]] if call in (0, 3) else [[1, 1.0, 4.0]] if call == 4 else []
        return {"abnormal_cols": columns, "abnormal_rows": [], "abnormal_points": []}

    records = play_records(ServingJob(4, "steady", 0, num_windows=3))
    assert places_named(records, analyse) == {("column", 2)}


def test_what_counts_as_right():
    assert is_right(ServingFault("column comm", 2.0, (3,)), ("column", 3))
    assert is_right(ServingFault("row", 2.0, (3,)), ("column", 3)) and is_right(
        ServingFault("row", 2.0, (3,)), ("row", 3)
    )
    assert is_right(ServingFault("point", 2.0, (3, 1)), ("point", 3, 1))
    assert not is_right(ServingFault("point", 2.0, (3, 1)), ("point", 1, 3))
    assert not is_right(ServingFault("column comp", 2.0, (3,)), ("row", 3))


def test_a_path_without_the_tool_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is .* a checkout of DeepXTrace"):
        load_tool(tmp_path)
