"""FarJoins: how instances of other hosts come to the fleet (--join-address): they ask over HTTP, as admins, what they
are to be; then their ranks connect to a TCP port of the frontend's own.

    joiner    FarJoinRequest
    server    FarJoinAnswer: the rank configuration, without secrets of the server's clients, and where ranks connect

What connects must know the run's token, which only the answer tells. Knows nothing of HTTP.
"""

import asyncio
import os
import re
import socket
from collections.abc import Collection
from dataclasses import replace

import msgspec

from eprt import env
from eprt.serve.errors import ApiError
from eprt.serve.fingerprint import begin_fingerprint, why_not_alike
from eprt.serve.options import FrontendConfig, InstanceName, OptionError, RankConfig, ServeOptions
from eprt.serve.rank_fit import why_no_teams

NEEDED = "this server takes instances of its own host only; start it with --join-address HOST:PORT to take others"


class FarJoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    ranks: int
    version: str  # of eprt
    host: str  # what it calls itself
    model: str | None = None  # its fingerprint; None: not known yet


class FarJoinAnswer(msgspec.Struct, frozen=True):
    config: RankConfig
    host: str  # where ranks connect; "": at the host of the server's URL
    port: int
    model: str  # fingerprint of the server's; "": not known


class FarJoins:
    """Of one server. OptionError where the address cannot be had."""

    def __init__(self, config: FrontendConfig):
        assert config.options.join_address is not None, "asked for by the caller"
        self._options, self._token = config.options, config.token
        host, port = config.options.join_address
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.sock = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise OptionError(f"--join-address {host}:{port}: cannot listen there: {error.strerror or error}") from None
        self._host = "" if host in ("0.0.0.0", "::") else host
        self._fingerprint = begin_fingerprint(self._options.engine.model_dir)
        self._num_given = 0

    @property
    def port(self) -> int:
        return self.sock.getsockname()[1]

    async def invite(self, request: FarJoinRequest, taken: Collection[str]) -> FarJoinAnswer:
        """What the instance is to be. taken: names of others. ApiError 409 where it does not fit."""
        mine = await asyncio.wrap_future(self._fingerprint)
        model_dir = self._options.engine.model_dir
        if why := why_not_alike(request.version, request.model, model_dir, lambda: mine):
            raise _refused(why)
        if why := why_no_teams(self._options.engine, request.ranks):
            raise _refused(why)
        name = self._free_name(request, taken)
        config = RankConfig(
            _without_secrets(self._options),
            rank=0,
            num_ranks=request.ranks,
            board_fd=-1,
            endpoint="",
            token=self._token,
            launcher_pid=0,
            variables=env.eprt_variables(),
            instance=name,
            num_host_ranks=request.ranks,
        )
        return FarJoinAnswer(config, self._host, self.port, mine)

    def _free_name(self, request: FarJoinRequest, taken: Collection[str]) -> InstanceName:
        """Named by its host: the launcher, which names those of this one, does not know of it."""
        host = re.sub(r"[^a-z0-9]+", "-", request.host.partition(".")[0].lower()).strip("-") or "host"
        while True:
            name = f"{request.role}-{host}-{self._num_given}"
            self._num_given += 1
            if name not in taken:
                break
        return InstanceName(name, request.role, os.urandom(8).hex(), request.ranks)


def _refused(why: str) -> ApiError:
    return ApiError(409, why, code="not_alike")


def _without_secrets(options: ServeOptions) -> ServeOptions:
    """As ranks need them. Any rank may be given the requests of all others, which load() counts by host."""
    engine, all_ranks = options.engine, options.num_ranks or 1
    engine = replace(engine, max_queue=all_ranks * (engine.max_queue + engine.max_num_seqs))
    return replace(options, engine=engine, api_key=None, admin_key=None)
