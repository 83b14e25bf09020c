"""Sequences: they end once, move with their tokens, and hear only the rank that runs them."""

from eprt.engine.outputs import TokenOutput
from eprt.engine.router import Router
from eprt.engine.sampling_params import SamplingParams
from eprt.serve.ranks.generation import Generation
from eprt.serve.ranks.messages import AddRequest
from eprt.serve.ranks.request_metrics import RequestMetrics
from eprt.serve.ranks.sequences import Sequences

PARAMS = SamplingParams(seed=1, n=2)


def running() -> tuple[Sequences, Generation]:
    """Sequences "1" on rank 0 and "2" on rank 1."""
    numbers = iter(range(1, 99))
    sequences = Sequences(Router(2, 4), RequestMetrics(), lambda: next(numbers), seed=0)
    generation = Generation(lambda request_id, reason: None)
    assert sequences.start(generation, [([5, 6], PARAMS)]) == [
        (0, AddRequest(1, "1", [5, 6], PARAMS, 0)),
        (1, AddRequest(2, "2", [5, 6], PARAMS, 1)),
    ]
    return sequences, generation


def test_a_sequence_moves_with_all_tokens_that_its_client_has_again_and_again():
    sequences, _ = running()
    sequences.add_output(1, TokenOutput("2", 7))
    sequences.router.close_rank(1)
    assert sequences.move_from(1) == [(0, AddRequest(3, "2", [5, 6], PARAMS, 1, [7]))]
    assert sequences.router.num_tokens == [2 + 3, 0] and sequences.num_moved == 1
    sequences.add_output(1, TokenOutput("2", 8))  # from the old rank: dropped
    sequences.add_output(0, TokenOutput("2", 8))
    sequences.router.open_rank(1)
    sequences.router.close_rank(0)
    (_, first), (rank, second) = sequences.move_from(0)
    assert rank == 1 and first.request_id == "1" and second == AddRequest(5, "2", [5, 6], PARAMS, 1, [7, 8])
    assert sequences.num_on(1) == 2 and sequences.num_on(0) == 0 and not sequences.quiet.is_set()


def test_what_has_ended_does_not_move():
    sequences, _ = running()
    sequences.add_output(1, TokenOutput("2", 7, finish_reason="stop"))
    assert sequences.move_from(1) == [] and len(sequences) == 1
    assert sequences.end("1") == 0 and sequences.end("1") is None and sequences.quiet.is_set()


def test_all_are_aborted_or_dropped_once():
    sequences, generation = running()
    assert sequences.abort_all() == [(0, "1"), (1, "2")] and sequences.abort_all() == []
    sequences, generation = running()
    assert sequences.drop_all() == [generation] and len(sequences) == 0 and sequences.quiet.is_set()


def test_every_end_counts_once_by_its_reason_and_its_prompt_once():
    sequences, _ = running()
    vllm = sequences._metrics.vllm
    sequences.add_output(0, TokenOutput("1", 7, num_cached_tokens=1, queued_s=0.5))
    sequences.add_output(0, TokenOutput("1", 8, finish_reason="stop"))
    assert vllm.ended == {(0, "stop"): 1} and vllm.histograms["vllm:request_queue_time_seconds", 0].total == 0.5
    assert vllm.histograms["vllm:request_prefill_kv_computed_tokens", 0].total == 2 - 1
    assert ("vllm:request_params_n", 0) not in vllm.histograms
    sequences.add_output(1, TokenOutput("2", -1, finish_reason="abort", error="a NaN"))
    assert vllm.ended == {(0, "stop"): 1, (1, "error"): 1}
    assert vllm.histograms["vllm:request_params_n", 1].total == 2
    assert vllm.histograms["vllm:request_max_num_generation_tokens", 1].total == 2
    sequences.end("2", "stop")
    assert vllm.ended.total() == 2


def test_what_its_client_leaves_or_a_lost_server_drops_is_counted_too():
    sequences, _ = running()
    sequences.end("1")
    sequences.drop_all()
    assert sequences._metrics.vllm.ended == {(0, "abort"): 1, (1, "error"): 1}


def test_the_oldest_sequence_of_each_rank_is_known():
    sequences, _ = running()
    assert sorted(sequences.oldest_by_rank()) == [0, 1]


def test_a_sequence_goes_to_another_group_and_ends_there():
    numbers = iter(range(50, 99))
    first, generation = running()
    second = Sequences(Router(1, 4), first._metrics, lambda: next(numbers), 0, prefix="2:", first_rank=2)
    first.add_output(0, TokenOutput("1", 7))
    sequence = first.take_out("1")
    assert sequence is not None and first.take_out("1") is None and first.router.num_tokens == [0, 2]
    first.add_output(0, TokenOutput("1", 8))  # of the rank that had it: dropped
    assert second.take_in(sequence, numbered=False) == (0, AddRequest(0, "1", [5, 6], PARAMS, 0, [7]))
    assert second.router.num_tokens == [3] and not second.quiet.is_set()
    second.add_output(0, TokenOutput("1", 9, finish_reason="stop"))
    assert second.quiet.is_set() and first._metrics.vllm.ended == {(2, "stop"): 1}, "by its number over all groups"
    assert second.start(generation, [([3], PARAMS)])[0][1].request_id == "2:50"
    (rank, again) = second.take_in(first.take_out("2"), hands_over=True)  # type: ignore[arg-type]
    assert (rank, again.seq, again.hands_over, again.generated) == (0, 52, True, [])


def test_several_prompts_of_one_generation_may_go_to_several_groups():
    sequences, generation = running()
    sequences.start(generation, [([9], PARAMS)])
    assert generation.request_ids == ["1", "2", "3", "4"]
    assert [sequences.find(one).index for one in generation.request_ids] == [0, 1, 2, 3]  # type: ignore[union-attr]
