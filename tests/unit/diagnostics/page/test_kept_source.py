"""Records in memory as a source: each once, the newest windows only, the same figures as from a log."""

import numpy as np
import pytest
from eprt.diagnostics.page.kept_source import KeptSource

from tests.unit.diagnostics.cases import matrices_of, synthetic_records, write_records
from tests.unit.diagnostics.page.cases import opened

RECORDS = synthetic_records(4, 5)


def kept(records=RECORDS, most_windows: int = 10) -> KeptSource:
    source = KeptSource("http://somewhere", 4, most_windows)
    source.add_records(records)
    return source


def test_a_record_that_comes_again_is_no_news():
    source = kept(RECORDS[:6])
    version = source.state()["version"]
    assert not source.add_records(RECORDS[:6]) and source.state()["version"] == version
    assert source.add_records(RECORDS[4:8]) and source.state()["version"] > version
    assert source.overview()["windows"]["ranks"] == [4, 4]


def test_old_windows_are_forgotten_everywhere():
    source = kept(most_windows=2)
    assert source.overview()["windows"]["window"] == [3, 4] and source.records(2) == []
    assert source.link(0, 1)["first"] == [3, 4] and source.window(None).calls_N.tolist() == [2 * 5800] * 4
    with pytest.raises(LookupError, match="window 2 is not there"):
        source.window(2)


def test_the_first_records_tell_the_nodes():
    records = synthetic_records(4, 1)
    assert kept([]).overview()["node_of_rank"] == [0] * 4
    moved = [type(one)(**{**one.__dict__, "node_of_rank": (0, 0, 1, 1)}) for one in records]
    assert kept(moved).overview()["node_of_rank"] == [0, 0, 1, 1]


def test_figures_are_those_of_a_log(tmp_path):
    source = kept()
    source.set_findings({})
    with opened(write_records(tmp_path, RECORDS)) as log:
        for number in (0, 3, None):
            np.testing.assert_allclose(source.window(number).planes_PNN, log.window(number).planes_PNN)
        assert source.link(2, 1) == log.link(2, 1) and source.rank(3) == log.rank(3)
        assert source.timeline("waits") == log.timeline("waits")
        assert source.overview()["windows"] == log.overview()["windows"]
    np.testing.assert_allclose(source.window(2).planes_PNN[0], matrices_of(RECORDS).dispatch_us_WNN[2])


def test_without_a_record_there_is_no_link():
    with pytest.raises(KeyError):
        kept([]).link(0, 1)
    with pytest.raises(KeyError):
        kept().link(0, 4)
    assert np.isnan(kept([]).window(None).planes_PNN).all()
