"""Which web pages may call the server from a browser (CORS). Knows no routes."""

from collections.abc import Awaitable, Callable

from starlette.middleware.cors import CORSMiddleware

_SHOWN_HEADERS = ("x-request-id", "retry-after")  # that a page may read, beside those that it always may


def with_origins(app: Callable[..., Awaitable[None]], origins: tuple[str, ...]) -> Callable[..., Awaitable[None]]:
    """The application, which answers pages of these origins. Without any, browsers keep answers from all pages."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_SHOWN_HEADERS,
        max_age=600,
    )
