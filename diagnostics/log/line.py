"""read_line: one line of the log as a record, fast where msgspec is there. Knows no file.

The result is the same with msgspec and without: what msgspec refuses goes the long way, which has the words for it.
"""

from .events import WindowRecord

try:
    from .typed_line import decode_line
except ModuleNotFoundError:  # numpy and the standard library are enough

    def decode_line(line: bytes) -> WindowRecord | None:
        return None


def read_line(line: bytes) -> WindowRecord:
    """As WindowRecord.from_line. ValueError saying what is wrong with the line."""
    record = decode_line(line)
    return WindowRecord.from_line(line.decode()) if record is None else record
