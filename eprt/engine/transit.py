"""Transit: requests that go on in another instance, or have come from one, while they do not run here, and their pages.

    held       they have a token and go on elsewhere; another rank reads their pages, which stay until it has
    arrived    their pages are filled here; they decode as soon as a row is free

Knows nothing of how pages travel (handoff.py), nor of steps.
"""

from eprt.engine.request import Request
from eprt.engine.request_pages import RequestPages


class Transit:
    """Of one rank."""

    def __init__(self, pages: RequestPages):
        self._pages = pages
        self.held: dict[str, Request] = {}  # by id
        self.arrived: list[Request] = []  # in the order of arrival
        self._newly_held: list[Request] = []

    def hold_pages(self, request: Request) -> None:
        """The request, which runs here no more, keeps its pages."""
        self._pages.keep_bookmark(request)
        self.held[request.request_id] = request
        self._newly_held.append(request)

    def take_newly_held(self) -> list[Request]:
        """Those held since the last call, as far as they still are."""
        newly, self._newly_held = self._newly_held, []
        return [request for request in newly if self.held.get(request.request_id) is request]

    def release_held(self, request_id: str) -> bool:
        """Its pages have been read, or nobody wants them. False where none are held."""
        request = self.held.pop(request_id, None)
        if request is not None:
            self._pages.release(request)
        return request is not None

    def take_arrived(self, most: int) -> list[Request]:
        """The first ones, which are to run now."""
        taken, self.arrived = self.arrived[: max(most, 0)], self.arrived[max(most, 0) :]
        return taken

    def drop_arrived(self, request: Request) -> bool:
        """Frees its pages. False where it is not among them."""
        if request not in self.arrived:
            return False
        self.arrived.remove(request)
        self._pages.release(request)
        return True

    @property
    def requests(self) -> list[Request]:
        """All that are here."""
        return [*self.held.values(), *self.arrived]
