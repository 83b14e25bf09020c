"""Errors: what a client is told when a request cannot be served, in OpenAI's shape; and lines for the operator.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

docs/errors.md lists every code. Knows nothing of HTTP frameworks.
"""

import socket
import sys
import time
from dataclasses import KW_ONLY, dataclass
from typing import Any, TextIO

import msgspec

_LONGEST_MESSAGE = 2000  # characters; clients' values are quoted in messages, and those go into the log, too
# The first rank that ends with another status than 0 ends mpirun's whole job, whether its words have arrived or not.
RANK_0_REPORTS_FIRST_S = 10.0


def print_line(line: str, stream: TextIO | None = None) -> None:
    """One line for the operator, on standard error by default, where lines that must not be missed begin with "eprt: ".

    The line is one write: the frontend, the launcher and the ranks share one terminal or file, and print() writes the
    end of the line apart, so that another process' words can come in between.
    """
    out = stream or sys.stderr
    try:
        out.write(line + "\n")
        out.flush()
    except OSError:
        pass  # mpirun, which forwards the output, is gone


def report_mistake(program: str, error: Exception, rank: int | None) -> None:
    """One line on standard error; the caller then ends with a status. rank: as env.launched_rank() says.

    Most mistakes are found by all ranks: rank 0 reports them, and mpirun ends the others while they wait here. A
    mistake that rank 0 does not share, as a directory that another host lacks, is reported by the rank that is still
    alive after the wait, with its name.
    """
    if rank:
        time.sleep(RANK_0_REPORTS_FIRST_S)
    where = f"rank {rank} on {socket.gethostname()}: " if rank else ""
    print_line(f"{program}: {where}{error}")


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal or failure that the client should see."""

    status: int  # of HTTP
    message: str  # for a person
    _: KW_ONLY
    code: str  # stable, for programs
    param: str | None = None  # the field to mend, if one is wrong
    kind: str = ""  # OpenAI's `type` of the error; "": by the status
    retry_after_s: int | None = None

    def __post_init__(self):
        self.message = shortened(self.message, _LONGEST_MESSAGE)
        super().__init__(self.message)
        self.kind = self.kind or ("invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        return msgspec.json.encode(self.body())


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """400: a field that eprt does not serve. It is refused by name, because ignoring it would change the answer."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def unavailable(message: str, *, code: str, retry_after_s: int | None = None) -> ApiError:
    return ApiError(503, message, code=code, kind="service_unavailable_error", retry_after_s=retry_after_s)


def shortened(text: str, length: int = 64) -> str:
    """The text, cut to a length that fits in a message."""
    return text if len(text) <= length else text[: length - 3] + "..."


def quoted(value: Any) -> str:
    """The value as JSON, for a message."""
    return shortened(msgspec.json.encode(value).decode(errors="replace"))
