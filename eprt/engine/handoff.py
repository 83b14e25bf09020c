"""Handoff: requests go on in another instance, which pulls their KV pages; and come from one.

Where a request is handed over (Request.hands_over), it is computed up to its next token, which its client has at once;
then its pages are held, and their checksums taken. The other instance offers it to one of its ranks. There it waits for
pages, as a new request would; shares those that the prefix cache has; pulls the others, in all layers; and checks them.
Only then does the prefix cache know them, and the request decodes from its next token on. Where pages of tokens are not
all there is (kv_cache.py: tails, bookmarks), the tail always comes along, and the last bookmark where it is lacking.

    held       what a request that was handed over keeps here, until drop_request()
    offered    waits here for pages
    arriving   its pages are being filled, or wait for start_request()

Copies and checksums are made in a thread, and no step waits for them; on GPUs they have a stream of their own, and wait
for the steps that fill or have filled the pages. A copy that is under way when its request is dropped goes on; its
pages are free when it has ended. Pages that are held, offered or arriving are no work: the engine
may sleep meanwhile. start_request() is work, and must be numbered (engine.py). Knows nothing of instances.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from eprt.engine.outputs import HandoffEvent
from eprt.engine.request import Request
from eprt.engine.schedule import Schedule
from eprt.engine.scheduler import Scheduler
from eprt.engine.structured_outputs import StructuredOutputs
from eprt.kv.readable_cache import ReadableCache
from eprt.kv.reader import HeldPages, PageReader, PageSource, open_reader


@dataclass(slots=True)
class _Arrival:
    """A request on its way to this rank."""

    request: Request
    held: HeldPages
    num_pulled: int = 0  # pages that it gets from the other side; the prefix cache here has the others
    pulled: Future[str] | None = None  # its error, "" for none; None: offered only
    told: bool = False  # that the pages have arrived
    dropped: bool = False


class Handoff:
    """One rank's. Its methods are called between steps, from one thread.

    Args:
        cache: whose pages others read, and into which theirs are read; None: requests stay here.
        compile_grammar: makes Request.grammar, in any thread.
    """

    def __init__(
        self, scheduler: Scheduler, cache: ReadableCache | None, compile_grammar: Callable[[StructuredOutputs], Any]
    ):
        self._scheduler, self._pool, self._cache = scheduler, scheduler.pool, cache
        self._compile_grammar = compile_grammar
        self.wake: Callable[[], None] = _wake_nobody  # called from the thread where advance() has something to do
        self.num_pulled_pages = 0
        self._thread = ThreadPoolExecutor(1, "pages", None if cache is None else cache.enter_thread)
        self._readers: dict[str, PageReader] = {}  # by PageSource.owner; the thread's
        self._summed: dict[str, tuple[Request, Future[list[int]]]] = {}  # held requests, by id
        self._arrivals: dict[str, _Arrival] = {}  # by id, in the order of arrival

    # -- requests that leave --

    @property
    def num_held(self) -> int:
        return len(self._scheduler.transit.held)

    @property
    def num_arriving(self) -> int:
        return len(self._arrivals)

    @property
    def source(self) -> PageSource | None:
        """Where others find this rank's pages."""
        return None if self._cache is None else self._cache.source

    def require_cache(self) -> ReadableCache:
        """ValueError where nobody can read this rank's pages."""
        if self._cache is None:
            raise ValueError("this engine's pages cannot be read by others: EngineConfig.hands_over is not set")
        return self._cache

    def note_launched(self, schedule: Schedule) -> None:
        """The step has been launched, and nothing since. It has filled the pages of those whose prompts it ends."""
        leaving = [chunk.request for chunk in schedule.chunks if chunk.is_last and chunk.request.hands_over]
        if leaving:
            behind_it = self.require_cache().after_steps()
            for request in leaving:
                request.await_entries = behind_it

    def drop_request(self, request_id: str) -> bool:
        """Forgets a request that is held, offered or arriving. False where there is none."""
        arrival = self._arrivals.get(request_id)
        if arrival is None or arrival.dropped:
            return self._scheduler.transit.release_held(request_id)
        if arrival.pulled is None:
            del self._arrivals[request_id]
        else:
            arrival.dropped = True
        return True

    # -- requests that come --

    def offer_request(self, request: Request, held: HeldPages) -> None:
        """A request that goes on here. Its last token is the first that its pages lack. ValueError where its id is in
        use, or the pages are not as this rank's are."""
        pool, num_tokens = self._pool, len(request.tokens_L) - 1
        num_pages = pool.num_needed(num_tokens) - pool.num_tail
        if request.request_id in self._arrivals:
            raise ValueError(f"request id {request.request_id!r} is about to arrive already")
        mine = self.require_cache().source
        if not mine.fits(held.source):
            raise ValueError(f"pages of {held.source.parts} do not fit into {mine.parts}")
        if len(held.pages) != num_pages or len(held.checksums) != len(held.all_pages):
            raise ValueError(f"{len(held.pages)} pages are held, the request has {num_pages}")
        if len(held.tail) != pool.num_tail or len(held.bookmark) not in (0, pool.num_bookmark):
            raise ValueError(
                f"{len(held.tail)} + {len(held.bookmark)} pages besides those of tokens are held, requests have "
                f"{pool.num_tail} + {pool.num_bookmark} here: nothing can go on from them"
            )
        self._arrivals[request.request_id] = _Arrival(request, held)

    def start_request(self, request_id: str) -> bool:
        """Lets a request whose pages have arrived run. False where it has gone."""
        arrival = self._arrivals.get(request_id)
        if arrival is None or arrival.dropped:
            return False
        del self._arrivals[request_id]
        self._scheduler.add_request(arrival.request, arrived=True)
        return True

    def forget_source(self, owner: str) -> None:
        """Lets go of a cache that is read no more."""
        self._thread.submit(self._close_reader, owner)

    # -- between steps --

    def advance(self) -> list[HandoffEvent]:
        """Takes what the thread has done, and gives it more to do."""
        events = [event for event in map(self._settle, list(self._arrivals)) if event is not None]
        for arrival in self._arrivals.values():
            if arrival.pulled is None and not self._begin_pull(arrival):
                break
        for request in self._scheduler.transit.take_newly_held():
            assert request.await_entries is not None, "a launched step has chosen its token"
            summed = self._submit(self._sum_pages, request.await_entries, _all_pages(request))
            self._summed[request.request_id] = request, summed
        return events + self._take_summed()

    def _take_summed(self) -> list[HandoffEvent]:
        events = []
        for request_id, (request, summed) in list(self._summed.items()):
            if summed.done():
                del self._summed[request_id]
                if self._scheduler.transit.held.get(request_id) is request:
                    pages = request.pages, summed.result(), request.tail, _bookmark(request)
                    held = HeldPages(self.require_cache().source, *pages)
                    events.append(HandoffEvent(request_id, held))
        return events

    def _begin_pull(self, arrival: _Arrival) -> bool:
        """Gives the request its pages, if there is room: as for a new request, one page per request stays available."""
        request, held, scheduler = arrival.request, arrival.held, self._scheduler
        num_others = len(scheduler.running) + len(scheduler.transit.arrived)
        num_others += sum(other.pulled is not None for other in self._arrivals.values())
        has_row = num_others < scheduler.max_running
        if not has_row or not scheduler.pages.make_room(request, bool(held.bookmark), num_others):
            return False
        to_pages, num_known = _all_pages(request), request.num_registered
        arrival.num_pulled = len(to_pages) - num_known
        pull = held, to_pages, num_known, self.require_cache().after_steps()
        arrival.pulled = self._submit(self._prepare_arrival, request, *pull)
        return True

    def _settle(self, request_id: str) -> HandoffEvent | None:
        """What has come of a pull that has ended since."""
        arrival = self._arrivals[request_id]
        if arrival.pulled is None or not arrival.pulled.done():
            return None
        error = arrival.pulled.result()
        if arrival.dropped or error:
            del self._arrivals[request_id]
            self._scheduler.pages.release(arrival.request)
            return None if arrival.dropped else HandoffEvent(request_id, error=error)
        if arrival.told:
            return None
        arrival.told = True
        self.num_pulled_pages += arrival.num_pulled
        return HandoffEvent(request_id, num_pulled=arrival.num_pulled)

    # -- in the thread --

    def _submit(self, function: Callable, *arguments) -> Future:
        future = self._thread.submit(function, *arguments)
        future.add_done_callback(lambda _: self.wake())
        return future

    def _sum_pages(self, await_entries: Callable[[], None], pages: Sequence[int]) -> list[int]:
        await_entries()
        return self.require_cache().checksums(pages)

    def _prepare_arrival(
        self,
        request: Request,
        held: HeldPages,
        to_pages: Sequence[int],
        num_known: int,
        await_writers: Callable[[], None],
    ) -> str:
        """Why the request cannot go on here with these pages, "" if it can. await_writers: steps that were launched
        before may still write into the pages, for requests that had them before."""
        try:
            if request.params.structured_outputs is not None:
                request.grammar = self._compile_grammar(request.params.structured_outputs)
            if num_known < len(to_pages):
                await_writers()
                self._pull_pages(held, to_pages, num_known)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _pull_pages(self, held: HeldPages, to_pages: Sequence[int], num_known: int) -> None:
        """All pages but the first num_known, and of the last ones as many as there is room for. OSError or ValueError
        where they are not what the other side held."""
        cache, source, pulled = self.require_cache(), held.source, slice(num_known, len(to_pages))
        if source.owner not in self._readers:
            self._readers[source.owner] = open_reader(source)
        self._readers[source.owner].read_pages(held.all_pages[pulled], cache.bytes_LPB, to_pages[pulled])
        if cache.checksums(to_pages[pulled]) != held.checksums[pulled]:
            raise ValueError(f"a page of process {source.pid} arrived damaged: its checksum is another one")

    def _close_reader(self, owner: str) -> None:
        if reader := self._readers.pop(owner, None):
            reader.close()

    # -- inspection --

    def arriving_requests(self) -> list[Request]:
        """Those that own pages and that the scheduler does not know yet."""
        return [arrival.request for arrival in self._arrivals.values() if arrival.pulled is not None]

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        for owner in list(self._readers):
            self._close_reader(owner)
        if self._cache is not None:
            self._cache.close()


def _bookmark(request: Request) -> list[int]:
    """Of a request on its way: it has one at most."""
    return [page for pages in request.bookmarks.values() for page in pages]


def _all_pages(request: Request) -> list[int]:
    """In the order of HeldPages.all_pages."""
    return [*request.pages, *request.tail, *_bookmark(request)]


def _wake_nobody() -> None:
    """Without a caller that sleeps."""
