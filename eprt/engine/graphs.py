"""DecodeGraphs: steps of decodes alone, recorded once as CUDA graphs and replayed: no launch costs the host anything.

One graph per number of rows; a step takes the next larger one and fills it up with padding: token -1, which goes to no
expert, in a KV page that belongs to nobody. A rank with nothing to decode replays the smallest, all padding: the others
need not wait for its launches.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from eprt.layers.batch import ForwardBatch


@dataclass(frozen=True)
class Recorded:
    """One graph, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    logits_XV: Tensor
    hidden_TH: Tensor


class DecodeGraphs:
    """sizes: numbers of rows, ascending. Construction is collective: it runs every size once on all ranks.

    padding_page: index of the page for padding. num_pages: most pages of a request. kv_cache_LPSD: the engine's.
    overlap: of every step recorded (overlap_policy.py).
    """

    def __init__(
        self, model, kv_cache_LPSD: Tensor, sizes: Sequence[int], num_pages: int, padding_page: int,
        overlap: str = "none",
    ):  # fmt: skip
        self.sizes, self._model, self._kv_cache = list(sizes), model, kv_cache_LPSD
        device, page_size, rows = kv_cache_LPSD.device, kv_cache_LPSD.shape[2], self.sizes[-1]

        def full(value: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self._padding = ForwardBatch(
            token_id_T=full(-1, rows),
            position_T=full(0, rows),
            kv_slot_T=full(padding_page * page_size, rows),
            page_table_BP=full(padding_page, rows, num_pages, dtype=torch.int32),
            seq_len_B=full(1, rows, dtype=torch.int32),
            query_start_B1=torch.arange(rows + 1, dtype=torch.int32, device=device),
            num_decode=rows,
            logits_idx=torch.arange(rows, device=device),
            mode="low_latency",
            overlap=overlap,
        )
        self._static = replace(self._padding, **{name: t.clone() for name, t in _tensors(self._padding)})
        self._num_filled = 0
        pool = torch.cuda.graph_pool_handle()
        self._recorded = {size: self._record(size, pool) for size in reversed(self.sizes)}

    def fits(self, batch: ForwardBatch) -> bool:
        return (
            batch.mode == "low_latency"
            and batch.num_tokens == batch.num_decode <= self.sizes[-1]
            and batch.logits_idx.shape[0] == batch.num_tokens
        )

    def run(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """What model.forward_with_hidden gives for a batch that fits. The results last until the next run."""
        num = batch.num_tokens
        recorded = self._recorded[self.sizes[bisect_left(self.sizes, num)]]
        self._fill(batch)
        recorded.graph.replay()
        return recorded.logits_XV[:num], recorded.hidden_TH[:num]

    def _fill(self, batch: ForwardBatch) -> None:
        num, static, padding = batch.num_tokens, self._static, self._padding
        for name in ("token_id_T", "position_T", "kv_slot_T", "seq_len_B"):
            to = getattr(static, name)
            to[:num] = getattr(batch, name)
            if num < self._num_filled:
                to[num : self._num_filled] = getattr(padding, name)[num : self._num_filled]
        width = batch.page_table_BP.shape[1]
        static.page_table_BP[:num, :width] = batch.page_table_BP
        if num < self._num_filled:
            static.page_table_BP[num : self._num_filled, :1] = padding.page_table_BP[num : self._num_filled, :1]
        self._num_filled = num

    def _record(self, size: int, pool) -> Recorded:
        s = self._static
        batch = replace(
            s,
            num_decode=size,
            query_start_B1=s.query_start_B1[: size + 1],
            **{name: tensor[:size] for name, tensor in _tensors(s) if name != "query_start_B1"},
        )
        self._model.forward_with_hidden(batch, self._kv_cache)  # compiles what a recording cannot
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits_XV, hidden_TH = self._model.forward_with_hidden(batch, self._kv_cache)
        return Recorded(graph, logits_XV, hidden_TH)


def _tensors(batch: ForwardBatch) -> list[tuple[str, Tensor]]:
    values = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return [(name, value) for name, value in values if isinstance(value, Tensor)]


def graph_sizes(wanted: Sequence[int], most_rows: int) -> list[int]:
    """The wanted sizes, none larger than most_rows, which is one of them: ascending."""
    return sorted({min(size, most_rows) for size in wanted} | ({most_rows} if wanted else set()))


def can_record(model) -> bool:
    """Whether no verb of its low-latency exchange waits for the GPU."""
    backend = getattr(model, "ep", {}).get("low_latency")
    return backend is None or backend.can_be_recorded
