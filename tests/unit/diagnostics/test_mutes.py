"""Mutes: places, end dates, and a file that others write too."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from eprt.diagnostics.mutes import (
    FILE_NAME,
    JobPlaces,
    Mute,
    MuteChange,
    MuteFile,
    check_place,
    mutes_beside,
    parse_until,
    place_of,
    with_mutes,
)

NOW_S = 1.8e9  # 2027-01-15


def finding(kind: str, **fields) -> dict:
    return {"kind": kind, "rank": None, "src": None, "dst": None, "nodes": [], "tier": None, **fields}


@pytest.mark.parametrize(
    ("told", "place"),
    [
        (finding("column", rank=3), "column:3"),
        (finding("hang", rank=0), "hang:0"),
        (finding("hang", src=0, dst=1), "hang:0-1"),
        (finding("point", src=2, dst=6), "point:2-6"),
        (finding("node", nodes=[1]), "node:1"),
        (finding("path", nodes=[0, 1]), "path:0-1"),
        (finding("tier", tier="between nodes"), "tier:between nodes"),
        (finding("job"), "job"),
        ({"kind": "row", "rank": 7, "src": None, "dst": None}, "row:7"),
    ],
)
def test_every_finding_has_a_place_that_can_be_muted(told, place):
    assert place_of(told) == place == check_place(place)


@pytest.mark.parametrize(
    "text", ["", "column", "column:x", "point:2", "path:1-2-3", "job:1", "tier:", "rank:3", "node:1-2"]
)
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="must be column:RANK"):
        check_place(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [("column:03", "column:3"), ("path:1-0", "path:0-1"), ("point:6-02", "point:6-2"), ("tier:a-1", "tier:a-1")],
)
def test_a_place_is_spelt_as_findings_spell_it(text, place):
    assert check_place(text) == place
    assert MuteChange.from_json(json.dumps({"place": text, "until": None}).encode(), NOW_S).place == place


def test_a_job_has_places_of_its_own():
    job = JobPlaces(4, frozenset({0, 2}))
    for place in ("column:3", "point:3-0", "hang:0-1", "node:2", "path:0-2", "tier:between racks", "job"):
        job.check(place)
    for place in ("row:4", "point:3-4", "hang:1-1", "node:1", "path:0-1", "path:2-2", "tier:racks"):
        with pytest.raises(ValueError, match=place):
            job.check(place)
    JobPlaces(4).check("node:1")
    with pytest.raises(ValueError, match="the job has rank 0 alone"):
        JobPlaces(1).check("column:1")


def test_an_end_is_a_date_a_time_or_a_span():
    assert parse_until("30m", NOW_S) == NOW_S + 1800 and parse_until("7d", NOW_S) == NOW_S + 7 * 86400
    assert parse_until("2027-02-01", NOW_S) == parse_until("2027-02-01T00:00+00:00", NOW_S) == 1801440000
    assert parse_until("2027-02-01T01:00+01:00", NOW_S) == 1801440000
    for bad, why in (("soon", "must be a date"), ("2026-01-01", "is over already"), ("", "must be a date")):
        with pytest.raises(ValueError, match=why):
            parse_until(bad, NOW_S)


def test_a_file_keeps_one_mute_a_place_until_its_end(tmp_path):
    file = MuteFile(tmp_path / FILE_NAME)
    assert file.read(NOW_S) == []
    file.add_mute(Mute("column:3", NOW_S + 10), NOW_S)
    file.add_mute(Mute("point:2-6", NOW_S + 20, "cable ordered"), NOW_S)
    file.add_mute(Mute("column:3", NOW_S + 30), NOW_S)
    assert {m.place: m.until - NOW_S for m in mutes_beside(tmp_path, NOW_S)} == {"column:3": 30, "point:2-6": 20}
    assert [m.place for m in file.read(NOW_S + 25)] == ["column:3"]
    assert file.remove_mute("column:3", NOW_S) and not file.remove_mute("column:3", NOW_S)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME], "nothing half-written is left"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": "eprt.mutes/1"}',
        '{"schema": "eprt.mutes/1", "mutes": [{"place": "x", "until": 1}]}',
        "[" * 100_000,
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ValueError, match=FILE_NAME):
        mutes_beside(tmp_path, NOW_S)


def test_muted_findings_stand_last_in_their_order():
    found = [finding("column", rank=rank) for rank in (1, 2, 3, 4)]
    told = with_mutes(found, [Mute("column:1", 5.0), Mute("column:3", 6.0), Mute("job", 7.0)])
    assert [(f["rank"], f["muted_until"]) for f in told] == [(2, None), (4, None), (1, 5.0), (3, 6.0)]
    assert [(f["place"], f["mute_note"]) for f in told[1:3]] == [("column:4", None), ("column:1", "")]
    assert json.dumps(told)


def test_changes_at_once_all_count(tmp_path):
    """A server, a page and a command may share the file."""
    changes = [MuteChange(f"column:{rank}", Mute(f"column:{rank}", NOW_S + 10)) for rank in range(24)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda change: MuteFile(tmp_path / FILE_NAME).change(change, NOW_S), changes))
    assert {mute.place for mute in mutes_beside(tmp_path, NOW_S)} == {change.place for change in changes}
    assert MuteFile(tmp_path / FILE_NAME).change(MuteChange("column:3", None), NOW_S)
    assert len(mutes_beside(tmp_path, NOW_S)) == 23


def test_a_mute_without_an_end_is_none(tmp_path):
    """JSON as Python writes it has Infinity, which browsers cannot read."""
    (tmp_path / FILE_NAME).write_text('{"schema": "eprt.mutes/1", "mutes": [{"place": "job", "until": Infinity}]}')
    assert mutes_beside(tmp_path, NOW_S) == []


def test_a_change_nested_without_end_is_refused():
    with pytest.raises(ValueError, match="nested too deeply"):
        MuteChange.from_json(b"[" * 100_000, NOW_S)


def test_an_end_that_no_calendar_has_is_refused(tmp_path):
    with pytest.raises(ValueError, match="9999-12-31T23:59:59-01:00: must be in the years 1 to 9999, in UTC"):
        parse_until("9999-12-31T23:59:59-01:00", 0.0)
    path = tmp_path / "mutes.json"
    path.write_text('{"schema": "eprt.mutes/1", "mutes": [{"place": "job", "until": 1' + "0" * 400 + "}]}")
    with pytest.raises(ValueError, match=r"mutes\.json: a mute is not a place and a time"):
        MuteFile(path).read(0.0)
