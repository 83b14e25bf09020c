"""Router: which rank gets a request. Used by the HTTP frontend and by LLM.

Each rank is charged the tokens that it has to compute or keep: prompt plus generated, for every request that has not
ended. A request goes to the rank where the charge plus the part of its prompt that must be computed is least; a rank
that had the same prefix before saves that part, because its prefix cache probably still has it. Requests with the same
cache key (a client's word that they begin alike) count as having the whole prompt in common. With tiers of service a
request is served before those of tiers behind its own: their tokens count only between ranks that are else alike.
The record of prefixes is an estimate of bounded size: a wrong entry costs time, never correctness.

Deterministic: the same calls give the same choices, so every rank of an offline run can keep its own copy. Knows of
the ranks only what it is told here; imports no torch.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from eprt.engine.request import QueueFullError

_MAX_PREFIXES = 65_536
_MAX_PAGES_COMPARED = 64


class Router:
    """Chooses ranks for requests, and keeps account of what each rank has.

    Args:
        max_requests_per_rank: running and waiting together.
        page_size: granularity, in tokens, at which the ranks share prefixes.
        num_tiers: of service; tier 0 goes first.
    """

    def __init__(self, num_ranks: int, max_requests_per_rank: int, page_size: int = 16, num_tiers: int = 1):
        self.max_requests_per_rank, self.page_size = max_requests_per_rank, page_size
        self.num_tokens = [0] * num_ranks  # charged to each rank
        self._tier_tokens = [[0] * num_tiers for _ in range(num_ranks)]  # those of each tier
        self.num_requests = [0] * num_ranks
        self.is_open = [True] * num_ranks  # which ranks are given requests
        self._request: dict[str, tuple[int, int, int]] = {}  # id -> (rank, tokens charged, tier)
        self._last_rank: OrderedDict[int, int] = OrderedDict()  # hash of a prefix of full pages -> rank

    def assign(
        self, request_id: str, prompt_token_ids: Sequence[int], cache_key: str | None = None, tier: int = 0
    ) -> int:
        """Chooses a rank and charges it. Raises QueueFullError when every rank is full, ValueError for a used id."""
        if request_id in self._request:
            raise ValueError(f"request id {request_id!r} is already assigned to rank {self._request[request_id][0]}")
        open_ranks = [r for r in self._open_ranks() if self.num_requests[r] < self.max_requests_per_rank]
        if not open_ranks:
            raise QueueFullError(
                f"all {len(self._open_ranks())} ranks have {self.max_requests_per_rank} requests each; try again later"
            )
        return self._charge(request_id, prompt_token_ids, open_ranks, cache_key, tier)

    def predict(
        self, prompt_token_ids: Sequence[int], cache_key: str | None = None, tier: int = 0
    ) -> tuple[int, int, int]:
        """What assign() would choose: the rank, the tokens of this tier and of those before it that it is charged
        with, and those of the prompt that it would have to compute. The rank is -1 where none is open."""
        open_ranks = self._open_ranks()
        if not open_ranks:
            return -1, 0, len(prompt_token_ids)
        saved = self._find_saved(list(self._prefixes(prompt_token_ids)), len(prompt_token_ids), cache_key)
        rank = self._least_charged(open_ranks, saved, tier)
        return rank, self.tokens_ahead(rank, tier), len(prompt_token_ids) - saved.get(rank, 0)

    def tokens_ahead(self, rank: int, tier: int) -> int:
        """That the rank is charged with for requests that do not give way to one of this tier."""
        return sum(self._tier_tokens[rank][: tier + 1])

    def reassign(self, request_id: str, token_ids: Sequence[int], tier: int = 0) -> int:
        """Chooses another rank for a request whose rank was closed, however many requests the others have.
        token_ids: prompt and generated."""
        self.release(request_id)
        return self._charge(request_id, token_ids, self._open_ranks(), None, tier)

    def close_rank(self, rank: int) -> None:
        """From now on the rank is given no requests, and its prefix cache is forgotten."""
        self.is_open[rank] = False
        self._last_rank = OrderedDict((prefix, r) for prefix, r in self._last_rank.items() if r != rank)

    def open_rank(self, rank: int) -> None:
        self.is_open[rank] = True

    def _open_ranks(self) -> list[int]:
        return [rank for rank, is_open in enumerate(self.is_open) if is_open]

    def _charge(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        open_ranks: list[int],
        cache_key: str | None,
        tier: int,
    ) -> int:
        prefixes = list(self._prefixes(prompt_token_ids))
        rank = self._least_charged(open_ranks, self._find_saved(prefixes, len(prompt_token_ids), cache_key), tier)
        if cache_key is not None:
            prefixes.append(_key_prefix(cache_key))
        self._request[request_id] = (rank, len(prompt_token_ids), tier)
        self._count(rank, tier, len(prompt_token_ids))
        self.num_requests[rank] += 1
        self._remember_prefixes(prefixes, rank)
        return rank

    def _least_charged(self, ranks: list[int], saved: dict[int, int], tier: int) -> int:
        def charge(rank: int) -> tuple[int, int, int, int]:
            saves = saved.get(rank, 0)
            return self.tokens_ahead(rank, tier) - saves, self.num_tokens[rank] - saves, self.num_requests[rank], rank

        return min(ranks, key=charge)

    def _count(self, rank: int, tier: int, num_tokens: int) -> None:
        self._tier_tokens[rank][tier] += num_tokens
        self.num_tokens[rank] += num_tokens

    def add_token(self, request_id: str) -> None:
        """The request has generated another token. Ended requests are ignored."""
        if request_id in self._request:
            rank, charged, tier = self._request[request_id]
            self._request[request_id] = (rank, charged + 1, tier)
            self._count(rank, tier, 1)

    def release(self, request_id: str) -> None:
        """The request has ended, in whatever way. May be called twice."""
        request = self._request.pop(request_id, None)
        if request is not None:
            rank, charged, tier = request
            self._count(rank, tier, -charged)
            self.num_requests[rank] -= 1

    def _prefixes(self, tokens: Sequence[int]) -> Iterator[int]:
        """Hashes of the prompt's first page, first two pages, and so on."""
        prefix = 0
        last = min(len(tokens) - 1, _MAX_PAGES_COMPARED * self.page_size)
        for end in range(self.page_size, last + 1, self.page_size):
            prefix = hash((prefix, *tokens[end - self.page_size : end]))
            yield prefix

    def _find_saved(self, prefixes: list[int], num_prompt: int, cache_key: str | None) -> dict[int, int]:
        """Per rank, the tokens of the longest prefix that went there last; all of a prompt with a known key."""
        saved: dict[int, int] = {}
        for i, prefix in enumerate(prefixes, 1):
            rank = self._last_rank.get(prefix)
            if rank is None:
                break
            saved[rank] = i * self.page_size
        last_rank = None if cache_key is None else self._last_rank.get(_key_prefix(cache_key))
        return saved if last_rank is None else saved | {last_rank: num_prompt}

    def _remember_prefixes(self, prefixes: list[int], rank: int) -> None:
        for prefix in reversed(prefixes):  # the shortest prefix is forgotten last
            self._last_rank[prefix] = rank
            self._last_rank.move_to_end(prefix)
        while len(self._last_rank) > _MAX_PREFIXES:
            self._last_rank.popitem(last=False)


def _key_prefix(cache_key: str) -> int:
    return hash(("cache key", cache_key))
