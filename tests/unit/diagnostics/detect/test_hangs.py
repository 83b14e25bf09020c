"""Who holds the others up: chains of waits are followed to their end, and no waiter is blamed for a missing rank."""

from eprt.diagnostics.detect.hangs import Culprit, find_culprits, hang_advice, hang_cause, hang_evidence, is_missing
from eprt.diagnostics.log.standing import LoggedProcess, Standing


def waits(peer: int, seconds: float = 3.0, call: str = "dispatch", heard_s: float = 0.2) -> Standing:
    return Standing(heard_s, peer, call, seconds)


MISSING, ASLEEP, COMPUTES = Standing(3.0), Standing(0.2, state="asleep"), Standing(0.2, state="computes")


def culprits(**standings: Standing) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Culprit -> who waits for it."""
    found = find_culprits({int(name[1:]): stood for name, stood in standings.items()})
    return {culprit.ranks: culprit.waiters for culprit in found}


def test_the_awaited_rank_is_to_blame_not_the_waiter():
    assert culprits(r0=waits(1), r1=MISSING) == {(1,): (0,)}
    assert culprits(r0=waits(2), r1=waits(2), r2=COMPUTES) == {(2,): (0, 1)}
    assert culprits(r0=waits(1, 0.1), r1=ASLEEP) == {(1,): (0,)}


def test_a_chain_is_followed_to_its_end():
    assert culprits(r0=waits(1), r1=waits(2), r2=waits(3), r3=MISSING) == {(3,): (0, 1, 2)}


def test_what_a_missing_rank_waited_for_before_counts_for_nothing():
    """Rank 1 was stopped while it waited for rank 0, which now waits for it."""
    assert culprits(r0=waits(1), r1=waits(0, heard_s=3.0)) == {(1,): (0,)}
    stopped = Standing(0.4, 0, "combine", 0.3, "stopped")
    assert is_missing(stopped) and culprits(r0=waits(1), r1=stopped) == {(1,): (0,)}
    disk = Standing(0.4, state="disk")
    assert not is_missing(disk), "a page fault is one, too"


def test_two_missing_ranks_are_both_named_also_where_waits_name_one():
    assert culprits(r0=waits(1), r1=MISSING, r2=waits(1), r3=MISSING) == {(1,): (0, 2), (3,): ()}


def test_ranks_that_wait_for_each_other_are_a_circle():
    found = find_culprits({0: waits(1, 7.0), 1: waits(2, 9.0), 2: waits(0, 8.0), 3: waits(1, 6.0)})
    assert found == [Culprit((0, 1, 2), (0, 1, 2, 3), 1, 9.0, "dispatch")]
    assert "wait for each other in a circle" in hang_evidence(found[0], {}) and "9.0 s" in hang_evidence(found[0], {})
    assert hang_cause(found[0], {}) == "unknown" and "network" in hang_advice(found[0], {}, {})


def test_nobody_is_to_blame_while_nobody_waits():
    assert culprits(r0=ASLEEP, r1=COMPUTES, r2=Standing(0.1)) == {}
    assert culprits(r0=waits(0)) == {}, "a rank does not wait for itself"


def test_a_wait_for_a_rank_that_takes_no_part_names_that_rank():
    assert culprits(r0=waits(7)) == {(7,): (0,)}


def words(stood: Standing, **others: Standing) -> tuple[str, str, str]:
    standings = {1: stood, **{int(name[1:]): other for name, other in others.items()}}
    (culprit,) = find_culprits(standings)
    process = {1: LoggedProcess("node3", 4711)}
    return (
        hang_cause(culprit, standings),
        hang_evidence(culprit, standings),
        hang_advice(culprit, standings, process),
    )


def test_words_say_what_is_known():
    cause, evidence, advice = words(Standing(3.2, state="stopped"), r0=waits(1, 3.0), r2=waits(1, 2.5, "combine"))
    assert cause == "stopped" and "on node3: kill -CONT 4711" in advice
    assert evidence == (
        "rank 1 has given no heartbeat for 3.2 s: its process is stopped by a signal (state T); ranks 0, 2 wait for "
        "it, rank 0 for 3.0 s in dispatch"
    )
    cause, evidence, advice = words(MISSING)
    assert (cause, evidence) == ("unknown", "rank 1 has given no heartbeat for 3.0 s; no other rank waits for it yet")
    assert "ps, py-spy dump --pid 4711" in advice
    cause, evidence, advice = words(COMPUTES, r0=waits(1, 12.0))
    assert cause == "comp" and evidence.startswith("rank 1 does not go on: its process computes")
    assert evidence.endswith("rank 0 waits for it for 12.0 s in dispatch") and "py-spy" in advice
    cause, evidence, advice = words(Standing(0.1, state="disk"), r0=waits(1, 12.0))
    assert cause == "unknown" and "state D" in evidence and "file system" in advice
    cause, evidence, advice = words(Standing(0.1, state="traced"), r0=waits(1))
    assert cause == "stopped" and "debugger" in evidence and "debugger" in advice
