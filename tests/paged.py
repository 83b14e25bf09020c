"""PagedRunner: forward passes over a paged cache, without an engine: the test says who computes what when."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eprt import ops
from eprt.engine.cache_format import CacheFormat
from eprt.layers.batch import ForwardBatch, Split
from eprt.layers.layer_cache import LayerCache
from eprt.ops.index_format import IndexFormat, hadamard
from eprt.ops.kv_format import KVFormat


@dataclass(eq=False)
class Request:
    """tokens: all that is known; num_done of them are in the cache."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    num_done: int = 0


class PagedRunner:
    """Pages are handed out in a scrambled order and start out as NaN, so that a stray read shows. overlap: of steps
    that are not told otherwise."""

    def __init__(
        self, model, num_pages: int = 96, page_size: int = 4, kv_cache_dtype: str = "auto", overlap: str = "none"
    ):
        self.model, self.page_size, self.device, self.overlap = model, page_size, model.device, overlap
        entry = CacheFormat.from_name(kv_cache_dtype, model.config, model.kv_dtype)
        nan = 0xFF if entry.latent.is_fp8 else float("nan")  # e4m3, bfloat16 and float32 of such bytes are NaN

        def pages(part) -> Tensor:
            return torch.full((num_pages, page_size, part.width), nan, dtype=part.dtype, device=self.device)

        parts = [part for part in (entry.latent, entry.index) if part is not None]
        num_layers = model.config.num_hidden_layers + (model.mtp is not None)
        self.cache_L = [LayerCache(*map(pages, parts)) for _ in range(num_layers)]
        self.num_steps = 0
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).tolist()

    def request(self, tokens: list[int], prefix_of: Request | None = None, num_shared: int = 0) -> Request:
        """num_shared tokens (whole pages) of another request's cache are taken over instead of computed."""
        assert num_shared % self.page_size == 0
        pages = prefix_of.pages[: num_shared // self.page_size] if prefix_of else []
        return Request(list(tokens), list(pages), num_shared)

    def forward(
        self, work: list[tuple[Request, int]], mode: str = "normal", overlap: str | None = None
    ) -> list[Tensor]:
        """Computes the next n tokens of each request in one step; fp32 logits [n, V] each, in the order given.

        A request's single token after its first counts as decoding, as in the engine.
        """
        self.num_steps += 1
        order = sorted(range(len(work)), key=lambda i: not (work[i][1] == 1 and work[i][0].num_done > 0))
        batch = self._batch([work[i] for i in order], mode, overlap or self.overlap)
        logits = self.model.forward(batch, self.cache_L[: self.model.config.num_hidden_layers])
        parts = logits.split([work[i][1] for i in order])
        for request, n in work:
            request.num_done += n
        return [part for _, part in sorted(zip(order, parts), key=lambda pair: pair[0])]

    def prefill(self, request: Request, chunk: int = 10**9) -> Tensor:
        """Logits [n, V] of all tokens not yet in the cache, computed alone, chunk by chunk."""
        parts = []
        while request.num_done < len(request.tokens):
            parts += self.forward([(request, min(chunk, len(request.tokens) - request.num_done))])
        return torch.cat(parts)

    def greedy(self, request: Request, num_new: int, chunk: int = 10**9) -> list[int]:
        """Prefills, then decodes one token a step."""
        return self.continue_greedy(request, self.prefill(request, chunk), num_new)

    def continue_greedy(self, request: Request, logits: Tensor, num_new: int) -> list[int]:
        """logits: of the prompt's last token, and any before it."""
        new: list[int] = []
        while True:
            new.append(int(logits[-1].argmax()))
            request.tokens.append(new[-1])
            if len(new) == num_new:
                return new
            (logits,) = self.forward([(request, 1)])

    def idle_step(self, mode: str = "normal") -> None:
        """What a rank without requests does so that the others can use its experts."""
        assert self.forward([], mode) == []

    def _batch(self, work: list[tuple[Request, int]], mode: str, overlap: str) -> ForwardBatch:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for request, n in work:
            end = request.num_done + n
            while len(request.pages) * self.page_size < end:
                request.pages.append(self.free.pop())
            for position in range(request.num_done, end):
                tokens.append(request.tokens[position])
                positions.append(position)
                slots.append(request.pages[position // self.page_size] * self.page_size + position % self.page_size)
            starts.append(starts[-1] + n)
        width = max((len(request.pages) for request, _ in work), default=0)
        table = [request.pages + [0] * (width - len(request.pages)) for request, _ in work]

        def tensor(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return ForwardBatch(
            token_id_T=tensor(tokens, torch.int64),
            position_T=tensor(positions, torch.int64),
            kv_slot_T=tensor(slots, torch.int64),
            page_table_BP=tensor(table).view(len(work), width),
            seq_len_B=tensor([request.num_done + n for request, n in work]),
            query_start_B1=tensor(starts),
            num_decode=sum(n == 1 and request.num_done > 0 for request, n in work),
            logits_idx=torch.arange(len(tokens), device=self.device),
            mode=mode,
            overlap=overlap,
            split=Split.in_middle(starts) if overlap == "tbo" else None,
        )


def fp8_cache_is_a_cache_of_rounded_entries(model, prompt: list[int]) -> None:
    """Of a float32 model: a prompt, whole; again behind a shared prefix, in chunks; decodes. What an fp8 cache gives is
    what a plain cache gives whose entries were rounded to fp8 and back."""
    operators = {
        name: getattr(ops, name) for name in ("latent_insert", "norm_insert", "index_key_insert", "attend_decodes")
    }
    config = model.config
    entry = KVFormat(config.kv_lora_rank, config.qk_rope_head_dim, torch.uint8)

    def round_stored(kv_pages: Tensor, kv_slot_T: Tensor) -> None:
        stored = kv_pages.view(-1, kv_pages.shape[-1])
        stored[kv_slot_T] = entry.decode(entry.encode(stored[kv_slot_T]))

    def rounding(kv_pages: Tensor, kv_slot_T: Tensor, *rest) -> None:
        operators["latent_insert"](kv_pages, kv_slot_T, *rest)
        round_stored(kv_pages, kv_slot_T)

    def rounding_beside_a_norm(q_TA, weight_A, eps, kv_pages: Tensor, kv_slot_T: Tensor, *rest) -> Tensor:
        q_TA = operators["norm_insert"](q_TA, weight_A, eps, kv_pages, kv_slot_T, *rest)
        round_stored(kv_pages, kv_slot_T)
        return q_TA

    def rounding_keys(key_pages: Tensor, kv_slot_T: Tensor, *rest) -> None:
        """Transformed, rounded, transformed back: the matrix is symmetric."""
        operators["index_key_insert"](key_pages, kv_slot_T, *rest)
        stored, size = key_pages.view(-1, key_pages.shape[-1]), key_pages.shape[-1]
        matrix, keys = hadamard(size, stored.dtype, stored.device) * size**-0.5, IndexFormat(size, torch.uint8)
        stored[kv_slot_T] = keys.decode(keys.encode(stored[kv_slot_T] @ matrix)) @ matrix

    def outputs(kv_cache_dtype: str) -> list[Tensor]:
        runner = PagedRunner(model, kv_cache_dtype=kv_cache_dtype)
        first = runner.request(prompt)
        whole = runner.prefill(first)
        shared = len(prompt) // 2 // runner.page_size * runner.page_size
        behind = runner.prefill(runner.request(prompt, first, shared), 7)
        return [whole, behind, torch.tensor(runner.continue_greedy(first, whole, 8), dtype=torch.float32)]

    got = outputs("fp8")
    ops.latent_insert, ops.norm_insert, ops.index_key_insert = rounding, rounding_beside_a_norm, rounding_keys
    ops.attend_decodes = lambda *_: None  # one by one
    try:
        want = outputs("auto")
    finally:
        for name, operator in operators.items():
            setattr(ops, name, operator)
    for a, b in zip(got, want):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-3, (a - b).abs().max()
