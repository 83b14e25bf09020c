"""Before the first request every rank computes a few batches of padding, so that kernels are compiled before a request
waits for them and memory is allocated before the cache is known to fit; then it records its steps of decodes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from eprt.config import EngineConfig
from eprt.engine.drafter import Drafter
from eprt.engine.graphs import DecodeGraphs, GraphsByContext, context_pages, graph_sizes, padding_rows
from eprt.engine.overlap_policy import OverlapPolicy
from eprt.engine.runner import Runner
from eprt.gpu.upload import upload
from eprt.layers.batch import ForwardBatch, HostRows, Split

_log = logging.getLogger(__name__)

_LONG_CHUNK = 256  # tokens at the end of the longest context: enough for every kernel, few enough not to take long


def prepare_gpu(
    runner: Runner,
    drafter: Drafter | None,
    config: EngineConfig,
    max_model_len: int,
    overlap: OverlapPolicy,
    replays: bool,
) -> tuple[list[int], int, int]:
    """Collective. Returns what log_graphs() tells. replays: whether steps may be recorded."""
    longest = min(config.chunk_size, max_model_len)
    warm_up(runner, drafter, longest, lambda num_tokens: overlap.for_step([num_tokens], "normal"), max_model_len)
    most_decodes = config.max_running * (1 + config.num_speculative_tokens)  # at most a chunk
    most_rows = min(config.low_latency_max_tokens, most_decodes)
    num_pages = -(-max_model_len // runner.page_size)
    wanted = config.graph_sizes if replays else ()
    sizes = record_decodes(runner, drafter, wanted, most_rows, num_pages, overlap.decode)
    return sizes, most_decodes, most_rows


@torch.inference_mode()
def warm_up(
    runner: Runner,
    drafter: Drafter | None,
    chunk_size: int,
    overlap_of: Callable[[int], str] = lambda num_tokens: "none",
    max_model_len: int = 0,
) -> None:
    """Collective. Computes prompts of many lengths up to chunk_size, all in the padding page.

    Their tokens differ, so that experts of all ranks get some, about as many as in service. The longest is computed
    again with the same token everywhere: all choose the same few experts, whose ranks then need the most memory.
    overlap_of: the overlap of a step of so many tokens, which is tried too. max_model_len: where requests have tails,
    chunks at the end of such a context are tried too: there an indexer chooses what they read.
    """
    lengths = sorted({1, *(1 << i for i in range(4, chunk_size.bit_length()) if 1 << i < chunk_size), chunk_size})
    with _ranks_that_compile(runner):
        for length, num_tokens in (*((length, runner.model.config.vocab_size) for length in lengths), (chunk_size, 1)):
            batch = _prompt(runner, length, num_tokens)
            batches = [batch]
            if overlap_of(length) == "tbo":
                batches.append(replace(batch, overlap="tbo", split=Split.in_middle([0, length])))
            for batch in batches:
                if drafter is None:
                    runner.model.forward(batch, runner.cache_L)
                else:
                    drafter.compute(batch, runner.compute(batch)[1])
        for length in _at_the_end(runner, chunk_size, max_model_len):
            runner.compute(_prompt(runner, length, runner.model.config.vocab_size, max_model_len - length))


@torch.inference_mode()
def record_decodes(
    runner: Runner, drafter: Drafter | None, sizes: Sequence[int], most_rows: int, num_pages: int, overlap: str
) -> list[int]:
    """Collective. Records passes of the model and of the MTP layer, which are then replayed; where they cannot be
    recorded, steps of several sizes are computed once. Returns the numbers of rows that are recorded.

    sizes: numbers of rows wanted. most_rows: of a step. num_pages: most of a request. overlap: of every such step.
    """
    try:
        runner.model.exchange.require_recordable()
        sizes = graph_sizes(sizes, most_rows)
    except ValueError as error:  # an EP call waits for the GPU
        _log.debug("steps of decodes cannot be recorded: %s", error)
        sizes = []

    def padding(num_rows: int, num_pages: int = num_pages) -> ForwardBatch:
        where = num_pages, runner.page_size, runner.padding_page, runner.device
        return padding_rows(num_rows, *where, overlap, runner.rows.tail_MF.shape[1])

    if not sizes:
        with _ranks_that_compile(runner):
            for num_rows in sorted({min(1 << i, most_rows) for i in range(most_rows.bit_length() + 1)}):
                hidden_TH = runner.compute(padding(num_rows))[1]
                if drafter is not None:
                    drafter.compute(padding(num_rows), hidden_TH)
        return []
    config, pool, graphs, of_drafts = runner.model.config, None, [], []
    for most_pages in context_pages(num_pages, runner.page_size, config):
        largest = padding(sizes[-1], most_pages)
        graphs.append(DecodeGraphs(runner.compute, sizes, largest, pool=pool))
        pool = graphs[0].pool
        if drafter is not None:
            hidden_TH = torch.zeros(sizes[-1], *runner.model.hidden_shape, dtype=config.dtype, device=runner.device)
            most_requests = len(runner.rows.length_M)
            of_drafts.append(DecodeGraphs(drafter.compute, sizes, largest, hidden_TH, most_requests, pool))
    with _ranks_that_compile(runner):
        for each in (*graphs, *of_drafts):
            each.compute_all()
    for each in (*graphs, *of_drafts):
        each.record()
    runner.graphs = GraphsByContext(graphs)
    if drafter is not None:
        drafter.graphs = GraphsByContext(of_drafts)
    return sizes


@contextmanager
def _ranks_that_compile(runner: Runner) -> Iterator[None]:
    """Collective. One rank may compile for longer than a wait in service may take: inside, all wait as they do while
    they set up, and none goes on before all have computed everything."""
    with runner.model.exchange.while_setting_up():
        yield
        if runner.device.type == "cuda":
            torch.cuda.synchronize()


def log_graphs(sizes: Sequence[int], most_decodes: int, most_rows: int) -> None:
    """sizes: numbers of rows that are recorded. most_decodes: rows, drafts included, that requests may fill in a step.
    most_rows: of a step in low-latency mode."""
    if sizes:
        _log.info("steps of decodes are replayed: CUDA graphs of %s rows", ", ".join(map(str, sizes)))
    else:
        _log.info("steps of decodes are launched anew each time: no CUDA graphs")
    if most_decodes > most_rows:
        _log.warning(
            f"steps may have {most_decodes} rows (--max-num-seqs, and drafts), but steps with more than {most_rows} on "
            f"a rank are neither recorded nor in low-latency mode: --low-latency-max-tokens {most_rows}"
        )


def _at_the_end(runner: Runner, chunk_size: int, max_model_len: int) -> tuple[int, ...]:
    """Lengths of chunks there."""
    if not runner.rows.tail_MF.shape[1] or max_model_len <= chunk_size:
        return ()
    return 1, min(16, chunk_size), min(_LONG_CHUNK, chunk_size)


def _prompt(runner: Runner, length: int, num_tokens: int, start: int = 0) -> ForwardBatch:
    """One request's tokens from position start on, which repeat 0..num_tokens - 1; each of them sees and overwrites the
    same page."""
    device, page, page_size = runner.device, runner.padding_page, runner.page_size
    end, position = start + length, torch.arange(start, start + length, device=device)
    host = HostRows(
        query_start_B1=np.array([0, length], dtype=np.int32),
        seq_len_B=np.array([end], dtype=np.int32),
        tail_BF=np.full((1, runner.rows.tail_MF.shape[1]), page, dtype=np.int32),
    )
    query_start_B1, seq_len_B, tail_BF = upload([host.query_start_B1, host.seq_len_B, host.tail_BF], device)
    has_tail = tail_BF.shape[1] > 0
    return ForwardBatch(
        token_id_T=position % num_tokens,
        position_T=position,
        kv_slot_T=page * page_size + position % page_size,
        page_table_BP=torch.full((1, -(-end // page_size)), page, dtype=torch.int32, device=device),
        seq_len_B=seq_len_B,
        query_start_B1=query_start_B1,
        num_decode=0,
        logits_idx=torch.zeros(1, dtype=torch.int64, device=device),
        mode="normal",
        tail_BF=tail_BF if has_tail else None,
        host=host if has_tail else None,
    )
