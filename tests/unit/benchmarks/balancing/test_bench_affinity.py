"""bench_affinity: topics, and what crosses between nodes as the planner says it."""

import json
from collections import Counter

import pytest

from benchmarks.balancing.bench_affinity import main
from benchmarks.balancing.topic_requests import TopicQuestions
from benchmarks.shapes import DEMO_MODEL
from eprt.engine.tokenizer import Tokenizer


def test_topics_are_skewed_and_questions_repeat_with_the_seed():
    tokenizer = Tokenizer(DEMO_MODEL)
    asked = {seed: TopicQuestions(tokenizer, seed, held_out=True) for seed in ("a", "b")}
    first = [asked["a"].next() for _ in range(5)]
    again = TopicQuestions(tokenizer, "a", held_out=True)
    assert [again.next() for _ in range(5)] == first != [asked["b"].next() for _ in range(5)]
    counts = Counter(asked["a"].draw().skill for _ in range(600)).most_common()
    assert counts[0][1] > 4 * counts[9][1]  # shares 1 and 1/10
    assert Counter(asked["b"].draw().skill for _ in range(600)).most_common(1)[0][0] == counts[0][0]


def test_affinity_saves_the_bytes_that_the_planner_predicts(tmp_path, capfd):
    flags = ["--turns", "1", "--nodes", "2", "--paces", "25", "--json", str(tmp_path)]
    assert main(flags) == 0, capfd.readouterr().err
    (row,) = json.loads((tmp_path / "affinity.json").read_text())["rows"]
    predicted = row["affinity_copies"] / row["balance_copies"]
    # A replica is not always the one that the planner has in mind, and routing goes along with each token.
    assert row["bytes_ratio"] == pytest.approx(predicted, abs=0.12) and row["bytes_ratio"] < 0.95
    # Bytes are those of the copies: three layers, there and back, 256 values in bf16 each.
    copies_kB = row["balance_copies"] * row["tokens"] * 3 * 2 * 512 / 1e3
    assert row["balance_kB"] == pytest.approx(copies_kB, rel=0.25)
