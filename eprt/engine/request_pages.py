"""RequestPages: which pages of the KV cache running requests own, and what the prefix cache learns of them.

Besides the pages of their tokens requests may have a tail, from admission to the end, and bookmarks: pages that a step
writes when a request passes a multiple of the page size, and that another request begins with (kv_cache.py). Those are
reserved before that step, as long as pages can be spared, and belong to the request until the prefix cache knows them.

Knows nothing of which requests run next.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from eprt.engine.batch_rows import BatchRows
from eprt.engine.kv_cache import PagePool
from eprt.engine.request import Request
from eprt.engine.schedule import Bookmark


class RequestPages:
    def __init__(self, pool: PagePool, rows: BatchRows):
        self.pool, self.rows = pool, rows
        self._leaving: list[list[int]] = []  # that the step under way still reads or writes, but no request owns

    def take_over(self, request: Request, reusable: int, num_spare: int) -> bool:
        """Gives a request the pages of all its tokens, those of its first tokens from the prefix cache where they are
        known, at most reusable. False where fewer than num_spare pages would stay available; then nothing changes."""
        pool, num_tokens = self.pool, len(request.tokens_L)
        known, node = pool.match_prefix(request.tokens_L, reusable)
        bookmark = pool.find_bookmark(node) if known else []
        num_new = pool.num_needed(num_tokens) - len(known)
        if pool.num_available - pool.num_cached(known + bookmark) - num_new < num_spare:
            return False
        pool.acquire(known + bookmark)
        request.pages = known + self._allocate(num_new - pool.num_tail)
        request.tail = self._allocate(pool.num_tail)
        request.takeover = tuple(bookmark)
        request.prefix_node, request.num_registered = node, len(known)
        request.num_prefilled = len(known) * pool.page_size
        request.prefill_end = num_tokens
        request.has_own_entries = False
        return True

    def begin_bookmarks(self, request: Request, start: int, end: int, num_spare: int) -> tuple[Bookmark, ...]:
        """Those that a step writes which computes the request's positions start..end-1. num_spare: pages that must stay
        available."""
        pool, size = self.pool, self.pool.page_size
        if not pool.num_bookmark or not pool.enable_prefix_cache or request.has_own_entries:
            return ()
        begun = []
        for boundary in range((start // size + 1) * size, end + 1, size):
            if boundary not in request.bookmarks and pool.num_available - pool.num_bookmark >= num_spare:
                request.bookmarks[boundary] = self._allocate(pool.num_bookmark)
            if boundary in request.bookmarks:
                begun.append(Bookmark(boundary, tuple(request.bookmarks[boundary])))
        return tuple(begun)

    def begin_for_decodes(
        self, decodes: Sequence[Request], row_B: np.ndarray, draft_B: np.ndarray | None, num_spare: int
    ) -> tuple[tuple[int, Bookmark], ...]:
        """Of decodes that pass a multiple of the page size in this step: index among them, bookmark. row_B: theirs.
        draft_B: how many drafts each computes."""
        if not self.pool.num_bookmark:
            return ()
        start_B, size = self.rows.length_M[row_B] - 1, self.pool.page_size
        end_B = start_B + 1 + (0 if draft_B is None else draft_B)
        begun: list[tuple[int, Bookmark]] = []
        for i in np.flatnonzero(end_B // size > start_B // size).tolist():
            bookmarks = self.begin_bookmarks(decodes[i], int(start_B[i]), int(end_B[i]), num_spare)
            begun += [(i, bookmark) for bookmark in bookmarks]
        return tuple(begun)

    def register_full(self, request: Request, num_tokens: int, is_written: bool = False) -> None:
        """Tells the prefix cache of the pages that the request's first num_tokens tokens fill, as far as the tokens
        behind them are known. is_written: no step that has still to be launched fills these."""
        if request.has_own_entries:
            return
        page_size, num_next = self.pool.page_size, self.pool.num_next
        num_tokens = min(num_tokens, int(self.rows.length_M[request.row]) - num_next)
        self._register_bookmark(request, is_written)
        for i in range(request.num_registered, num_tokens // page_size):
            tokens = self.rows.tokens_ML[request.row, i * page_size : (i + 1) * page_size + num_next]
            request.prefix_node = self.pool.register(request.pages[i], request.prefix_node, tokens)
            request.num_registered += 1
            self._register_bookmark(request, is_written)

    def _register_bookmark(self, request: Request, is_written: bool) -> None:
        """The one behind the last page that is known, if the request has it."""
        bookmark = request.bookmarks.pop(request.num_registered * self.pool.page_size, None)
        if bookmark is not None:
            self.pool.register_bookmark(request.prefix_node, bookmark)
            if is_written:
                self.pool.release(bookmark)
            else:
                self._leaving.append(bookmark)

    def end_step(self, requests: Sequence[Request]) -> None:
        """The step is launched: what later ones write comes behind it. requests: that it began with."""
        for request in requests:
            if request.takeover:
                self._leaving.append(list(request.takeover))
                request.takeover = ()
        for pages in self._leaving:
            self.pool.release(pages)
        self._leaving.clear()

    def drop_step(self, bookmarks: Sequence[Bookmark]) -> None:
        """The step is thrown away: nobody finds what it was to write."""
        for bookmark in bookmarks:
            for page in bookmark.pages:
                self.pool.forget(page)
        self.end_step(())

    def release(self, request: Request) -> None:
        """Of a request that leaves its row."""
        pool = self.pool
        pool.release(request.pages)
        for pages in (request.tail, request.takeover, *request.bookmarks.values()):
            if pages:
                pool.release(pages)
        request.pages, request.tail, request.takeover = [], [], ()
        request.bookmarks.clear()

    def keep_bookmark(self, request: Request) -> None:
        """Of a request that goes on elsewhere with its pages and its tail. Of bookmarks the one behind its last full
        page stays, where that is known: so prompts that begin likewise can go on from it there."""
        for pages in (request.takeover, *request.bookmarks.values()):
            self.pool.release(pages)
        request.takeover = ()
        request.bookmarks.clear()
        known = [] if request.has_own_entries else self.pool.find_bookmark(request.prefix_node)
        if known and len(known) == self.pool.num_bookmark:
            self.pool.acquire(known)
            request.bookmarks[request.num_registered * self.pool.page_size] = known

    def make_room(self, request: Request, has_bookmark: bool, num_spare: int) -> bool:
        """Gives a request that comes from elsewhere, with all its tokens but the last computed, the pages of these: the
        first ones from the prefix cache where they are known, room for the others and its tail and, where it has a
        bookmark that is not known and can be spared, for that. False where fewer than num_spare pages would stay
        available; then nothing changes."""
        pool, num_tokens = self.pool, len(request.tokens_L) - 1
        known, node = pool.match_prefix(request.tokens_L, num_tokens, has_tail=True)
        num_new = pool.num_needed(num_tokens) - len(known)
        num_left = pool.num_available - pool.num_cached(known) - num_new - num_spare
        if num_left < 0:
            return False
        pool.acquire(known)
        request.pages = known + self._allocate(num_new - pool.num_tail)
        request.tail = self._allocate(pool.num_tail)
        request.prefix_node, request.num_registered = node, len(known)
        num_full = num_tokens // pool.page_size
        is_known = len(known) == num_full and len(pool.find_bookmark(node)) == pool.num_bookmark
        if has_bookmark and not is_known and pool.enable_prefix_cache and num_left >= pool.num_bookmark:
            request.bookmarks[num_full * pool.page_size] = self._allocate(pool.num_bookmark)
        return True

    def _allocate(self, num: int) -> list[int]:
        return [self.pool.allocate() for _ in range(num)]

    def owned(self, requests: Sequence[Request]) -> Iterator[Sequence[int]]:
        """Every page that is owned, as often as it has owners."""
        for request in requests:
            yield from (request.pages, request.tail, request.takeover, *request.bookmarks.values())
        yield from self._leaving
