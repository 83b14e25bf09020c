"""What every source tells the page: its state, the findings, the experts of a window."""

from eprt.diagnostics.page.kept_source import KeptSource

from tests.unit.diagnostics.cases import record, with_experts

NOT_RECORDED = ["expert load and placement: not recorded"]


def recording(*records) -> KeptSource:
    source = KeptSource("somewhere", 2, 10)
    source.add_records(records)
    return source


def test_the_version_changes_with_whatever_is_shown():
    source = recording()
    seen = [source.state()["version"]]
    for change in (source.mark_changed, lambda: source.set_findings({"findings": []})):
        change()
        seen.append(source.state()["version"])
    assert len(set(seen)) == 3 and source.state() == source.state()


def test_many_problems_are_counted_and_the_first_shown():
    source = recording()
    assert source.overview()["findings"] is None and source.overview()["problems"] == {"count": 0, "first": []}
    source.set_findings({"windows": 0}, list(range(70)), trouble="none")
    overview = source.overview()
    assert overview["findings"] == {"windows": 0} and overview["trouble"] == "none"
    assert overview["problems"] == {"count": 70, "first": [str(number) for number in range(50)]}


def test_experts_of_a_window_and_of_the_newest_that_all_ranks_tell():
    lines = [with_experts(record(rank, window, 2), 2 * rank, 2 * rank + 1) for window in (3, 4) for rank in range(2)]
    source = recording(*lines[:3])
    document = source.experts(None)
    assert document["experts"] == {
        "source": "window 3",
        "epoch": 0,
        "layers": [1],
        "rank_of_slot": [0, 0, 1, 1],
        "expert_of_slot": [[0, 1, 2, 3]],
        "rows": [[3, 3, 3, 3]],
        "load": [[3, 3, 3, 3]],
    }
    assert document["schema"] == "eprt.experts/1" and document["notes"] == []
    assert source.experts(4)["experts"] is None and source.experts(4)["notes"] == NOT_RECORDED
    source.add_records(lines[3:])
    assert source.experts(None)["experts"]["source"] == "window 4" and source.experts(3) == document


def test_experts_that_are_not_recorded():
    source = recording(record(0, 1, 2), record(1, 1, 2))
    for number in (None, 1, 7):
        expected = {"experts": None, "migrations": {"total": 0, "moves": []}, "notes": NOT_RECORDED}
        assert source.experts(number) == {"schema": "eprt.experts/1", **expected}
