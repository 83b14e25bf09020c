"""DecodeGraphs: steps of decodes alone, recorded once as CUDA graphs and replayed: no launch costs the host anything.

One graph per number of rows; a step takes the next larger one and fills it up with padding: token -1, which goes to no
expert, in a KV page that belongs to nobody. A rank with nothing to decode replays the smallest, all padding: the others
need not wait for its launches.

What is recorded is any function of a batch: the model's pass, and the MTP layer's, which also takes hidden states.
"""

import functools
import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from eprt.config import ModelConfig
from eprt.layers.batch import ForwardBatch
from eprt.layers.compressor import OVERLAPPING_RATIO


@dataclass(frozen=True)
class Recorded:
    """A computation that can be repeated from and to the same memory."""

    replay: Callable[[], None]
    results: tuple[Tensor, ...]


def record(compute: Callable[[], tuple[Tensor, ...]], pool: Any) -> Recorded:
    """compute has been called before: that compiles what a recording cannot."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # GPU memory of an earlier engine that was freed meanwhile would break the recording off
    try:
        with torch.cuda.graph(graph, pool=pool):
            results = compute()
    finally:
        if collects:
            gc.enable()
    return Recorded(graph.replay, results)


def padding_rows(
    num_rows: int,
    num_pages: int,
    page_size: int,
    padding_page: int,
    device: torch.device,
    overlap: str = "none",
    num_tail: int = 0,
) -> ForwardBatch:
    """Decodes that belong to no request. num_pages: most pages of a request. padding_page: index of the page that they
    use. overlap: of every step recorded (overlap_policy.py). num_tail: pages that requests have besides."""

    def full(value: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return ForwardBatch(
        token_id_T=full(-1, num_rows),
        position_T=full(0, num_rows),
        kv_slot_T=full(padding_page * page_size, num_rows),
        page_table_BP=full(padding_page, num_rows, num_pages, dtype=torch.int32),
        seq_len_B=full(1, num_rows, dtype=torch.int32),
        query_start_B1=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        num_decode=num_rows,
        logits_idx=torch.arange(num_rows, device=device),
        mode="low_latency",
        overlap=overlap,
        tail_BF=full(padding_page, num_rows, num_tail, dtype=torch.int32) if num_tail else None,
        by_rows=num_tail > 0,
    )


class DecodeGraphs:
    """The graphs of one function of a batch. On all ranks compute_all() comes first, then record(), then run().

    Args:
        compute: what to record, of a batch and, with hidden_TH, of as many hidden states: tensors with a row for each
            of the batch's logits_idx.
        sizes: numbers of rows, ascending.
        padding: as many rows as the largest (padding_rows()).
        hidden_TH: as many rows, any values of the right dtype.
        most_chosen: most rows in logits_idx; default all rows.
        pool: of another DecodeGraphs, whose memory may be shared.
    """

    def __init__(
        self,
        compute: Callable[..., tuple[Tensor, ...]],
        sizes: Sequence[int],
        padding: ForwardBatch,
        hidden_TH: Tensor | None = None,
        most_chosen: int | None = None,
        pool: Any = None,
    ):
        self.sizes = list(sizes)
        self.num_replays = 0
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._compute, self._padding, self._hidden_TH = compute, padding, hidden_TH
        self._most_chosen = most_chosen or self.sizes[-1]
        # What the graphs read: rows from _num_filled on, and from _num_chosen on in logits_idx, are padding.
        self._static = replace(padding, **{name: tensor.clone() for name, tensor in _tensors(padding).items()})
        self._num_filled = self._num_chosen = 0
        self._recorded: dict[int, Recorded] = {}

    def compute_all(self) -> None:
        """Collective. Computes every size once, as it will be recorded."""
        for size in reversed(self.sizes):
            self._compute(*self._inputs(size))

    def record(self) -> None:
        """Collective."""
        for size in reversed(self.sizes):
            self._recorded[size] = record(functools.partial(self._compute, *self._inputs(size)), self.pool)

    def fits(self, batch: ForwardBatch) -> bool:
        return (
            batch.mode == "low_latency"
            and batch.page_table_BP.shape[1] <= self._static.page_table_BP.shape[1]
            and len(batch.logits_idx) <= self._most_chosen
            and batch.num_tokens == batch.num_decode <= self.sizes[-1]
        )

    def run(self, batch: ForwardBatch, hidden_TH: Tensor | None = None) -> tuple[Tensor, ...]:
        """compute's results for a batch that fits. They last until the next run."""
        recorded = self._recorded[self.sizes[bisect_left(self.sizes, batch.num_tokens)]]
        self._fill(batch)
        if self._hidden_TH is not None and hidden_TH is not None:
            self._hidden_TH[: batch.num_tokens] = hidden_TH
        recorded.replay()
        self.num_replays += 1
        return tuple(result[: len(batch.logits_idx)] for result in recorded.results)

    def _fill(self, batch: ForwardBatch) -> None:
        num, static, padding = batch.num_tokens, self._static, self._padding
        outdated = slice(num, max(num, self._num_filled))  # rows of the step before
        for name in ("token_id_T", "position_T", "kv_slot_T", "seq_len_B", "tail_BF"):
            if getattr(static, name) is None:
                continue
            tensor = getattr(static, name)
            tensor[:num] = getattr(batch, name)
            if num < self._num_filled:
                tensor[outdated] = getattr(padding, name)[outdated]
        static.page_table_BP[:num, : batch.page_table_BP.shape[1]] = batch.page_table_BP
        if num < self._num_filled:
            static.page_table_BP[outdated, :1] = padding.page_table_BP[outdated, :1]
        self._num_filled = num
        self._fill_logits_idx(batch)

    def _fill_logits_idx(self, batch: ForwardBatch) -> None:
        """As a rule all rows are wanted, in order, which is what the padding says too."""
        num = len(batch.logits_idx)
        num = 0 if num == batch.num_tokens else num
        self._static.logits_idx[:num] = batch.logits_idx[:num]
        if num < self._num_chosen:
            self._static.logits_idx[num : self._num_chosen] = self._padding.logits_idx[num : self._num_chosen]
        self._num_chosen = num

    def _inputs(self, size: int) -> list[Any]:
        rows = {name: tensor[:size] for name, tensor in _tensors(self._static).items()}
        rows["query_start_B1"] = self._static.query_start_B1[: size + 1]
        rows["logits_idx"] = rows["logits_idx"][: self._most_chosen]
        inputs: list[Any] = [replace(self._static, num_decode=size, **rows)]
        if self._hidden_TH is not None:
            inputs.append(self._hidden_TH[:size])
        return inputs


class GraphsByContext:
    """Graphs for short contexts and for long ones, in this order: a step takes the first that fit it."""

    def __init__(self, graphs: Sequence[DecodeGraphs]):
        self._graphs = list(graphs)

    @property
    def pool(self) -> Any:
        return self._graphs[0].pool

    @property
    def num_replays(self) -> int:
        return sum(graphs.num_replays for graphs in self._graphs)

    @property
    def num_replays_by_context(self) -> list[int]:
        return [graphs.num_replays for graphs in self._graphs]

    def fits(self, batch: ForwardBatch) -> bool:
        return any(graphs.fits(batch) for graphs in self._graphs)

    def run(self, batch: ForwardBatch, hidden_TH: Tensor | None = None) -> tuple[Tensor, ...]:
        """See DecodeGraphs.run."""
        return next(graphs for graphs in self._graphs if graphs.fits(batch)).run(batch, hidden_TH)


def context_pages(num_pages: int, page_size: int, config: ModelConfig) -> list[int]:
    """Most pages of a request, for each set of graphs: contexts that an indexer leaves alone have their own."""
    short = 0
    if config.indexer is not None:
        short = config.indexer.top_k // page_size
    elif config.v4 is not None and OVERLAPPING_RATIO in config.v4.compress_ratios:
        short = config.v4.index_topk * OVERLAPPING_RATIO // page_size
    return [short, num_pages] if 0 < short < num_pages else [num_pages]


def _tensors(batch: ForwardBatch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def graph_sizes(wanted: Sequence[int], most_rows: int) -> list[int]:
    """The wanted sizes up to most_rows, and most_rows itself, ascending; none if none is wanted."""
    return sorted({min(size, most_rows) for size in wanted} | ({most_rows} if wanted else set()))
