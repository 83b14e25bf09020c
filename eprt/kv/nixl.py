"""The reader `nixl`: NVIDIA's transfer library (the extra `nixl`), which knows InfiniBand, RoCE, EFA and TCP.

Ends find each other through the KVPageServer, whose connection also tells at once that the other process is gone. Bytes
arrive in memory of this reader's own, and are copied into their pages from there: a transfer that was given up may
write later, and must not meet pages that somebody else has by then. Knows nothing of requests.
"""

import itertools
import logging
import mmap
import os
import select
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from eprt.handshake import receive_exactly
from eprt.kv.page_server import AGENT, NUMBER, PATIENCE_S
from eprt.kv.pieces import page_pieces
from eprt.kv.reader import PageReader, PageSource, check_pages
from eprt.kv.tcp import PageConnection

_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_LANDING_BYTES = 16 << 20  # of a transfer: the library may keep Python's lock for as long
_LOOK_S = 5e-5
_MOST_TOLD = 1 << 24


def load_nixl() -> Any:
    """The library. ValueError with the remedy where it is not installed, or cannot run here."""
    why = "not installed"
    for name in _MODULES:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            why = str(error)
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of every agent
        return module
    raise ValueError(f"NIXL is needed, the extra nixl of eprt (pip install nixl-cu13): {why}")


def _make_agent(name: str) -> Any:
    library = load_nixl()
    try:
        return library.nixl_agent(name, library.nixl_agent_config(backends=["UCX"]))
    except Exception as error:  # of the library's own kinds
        raise ValueError(f"NIXL cannot start here: {error}") from None


class AgentDescription(msgspec.Struct, frozen=True):
    """What a reader must know of the other end."""

    metadata: bytes  # as NIXL has it
    addresses: list[int]  # where each part begins, in the owner's memory


class NixlPages:
    """The owner's end. Its library's thread answers; nothing here runs then."""

    def __init__(self, parts_LPB: Sequence[np.ndarray]):
        self._agent = _make_agent(f"eprt-pages-{os.getpid()}-{os.urandom(8).hex()}")
        regions = [(part.ctypes.data, part.nbytes, 0, "") for part in parts_LPB]
        try:
            self._agent.register_memory(regions, "DRAM")
            metadata = self._agent.get_agent_metadata()
        except Exception as error:
            raise ValueError(f"NIXL cannot reach the KV cache: {error}") from None
        self.description = msgspec.msgpack.encode(AgentDescription(metadata, [region[0] for region in regions]))


class _Landing:
    """Where bytes arrive."""

    def __init__(self, agent: Any):
        self.bytes_B = np.frombuffer(mmap.mmap(-1, _LANDING_BYTES), dtype=np.uint8)
        self.address: int = self.bytes_B.ctypes.data
        agent.register_memory([(self.address, _LANDING_BYTES, 0, "")], "DRAM")


class NixlReader(PageReader):
    """Connects with the first pages, and anew after an error."""

    def __init__(self, source: PageSource):
        self._source = source
        self._agent = _make_agent(f"eprt-reader-{os.getpid()}-{os.urandom(8).hex()}")
        self._landing = _Landing(self._agent)
        self._given_up: list[Any] = []  # what the library may still write into, or needs for that
        self._connection: PageConnection | None = None
        self._owner = ""  # the name of the other end's agent
        self._addresses: list[int] = []

    def read_pages(self, from_pages: Sequence[int], into_LPB: Sequence[np.ndarray], to_pages: Sequence[int]) -> None:
        check_pages(self._source, from_pages, into_LPB, to_pages)
        if not from_pages:
            return
        try:
            if self._connection is None:
                self._connect()
            for remote, pieces in self._transfers(from_pages, into_LPB, to_pages):
                self._fetch(remote)
                begin = 0
                for piece in pieces:
                    piece[:] = self._landing.bytes_B.data[begin : begin + len(piece)]
                    begin += len(piece)
        except OSError as error:
            self.close()
            raise OSError(f"the pages of process {self._source.pid} cannot be read by NIXL: {error}") from None

    def _connect(self) -> None:
        self._connection = connection = PageConnection(self._source)
        connection.ask(AGENT)
        deadline_s = time.monotonic() + PATIENCE_S
        (num_bytes,) = NUMBER.unpack(receive_exactly(connection.sock, NUMBER.size, deadline_s))
        if num_bytes > _MOST_TOLD:
            raise ConnectionError(f"the other end tells {num_bytes} bytes of itself")
        told = receive_exactly(connection.sock, num_bytes, deadline_s)
        try:
            description = msgspec.msgpack.decode(told, type=AgentDescription)
            self._owner = self._agent.add_remote_agent(description.metadata)
        except Exception as error:
            raise ConnectionError(f"the other end's description is of no use: {error}") from None
        self._addresses = description.addresses

    def _transfers(
        self, from_pages: Sequence[int], into_LPB: Sequence[np.ndarray], to_pages: Sequence[int]
    ) -> list[tuple[np.ndarray, list[memoryview]]]:
        """Pieces of the other end's memory, as many as find room at once, as [n, 3] of address, bytes and 0; and where
        the bytes go."""
        remote = []
        for begin, part in zip(self._addresses, self._source.parts, strict=True):
            num_layers, num_pages, num_bytes = part.shape
            at_PL = np.array(from_pages)[:, None] + np.arange(num_layers) * num_pages
            remote.append(np.stack([begin + at_PL.ravel() * num_bytes, np.full(at_PL.size, num_bytes)], axis=1))
        addresses_N2 = np.concatenate(remote)
        remote_N3 = np.pad(addresses_N2, ((0, 0), (0, 1))).astype(np.uint64)
        pieces = page_pieces(into_LPB, to_pages)
        transfer_N = np.cumsum(addresses_N2[:, 1]) // (_LANDING_BYTES - addresses_N2[:, 1].max())
        cuts = [0, *(np.flatnonzero(np.diff(transfer_N)) + 1).tolist(), len(pieces)]
        return [(remote_N3[a:b], pieces[a:b]) for a, b in itertools.pairwise(cuts)]

    def _fetch(self, remote_N3: np.ndarray) -> None:
        """Fills the landing place, from its start on."""
        assert self._connection is not None, "connected by the caller"
        local_N3 = remote_N3.copy()
        local_N3[:, 0] = self._landing.address + np.cumsum(remote_N3[:, 1]) - remote_N3[:, 1]
        handle = None
        try:
            descriptors = [self._agent.get_xfer_descs(each, "DRAM") for each in (local_N3, remote_N3)]
            handle = self._agent.initialize_xfer("READ", *descriptors, self._owner)
            state, deadline_s = self._agent.transfer(handle), time.monotonic() + PATIENCE_S
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"nothing has come within {PATIENCE_S:g} s")
                if select.select([self._connection.sock], [], [], 0)[0]:
                    raise ConnectionError("the other process is gone")
                time.sleep(_LOOK_S)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise ConnectionError("the transfer failed")
            handle.release()
        except Exception as error:
            self._given_up += [handle, self._landing]
            self._landing = _Landing(self._agent)
            raise error if isinstance(error, OSError) else ConnectionError(str(error)) from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._owner:
            try:
                self._agent.remove_remote_agent(self._owner)
            except Exception as error:
                logging.getLogger(__name__).debug("NIXL: %s", error)
            self._owner = ""
