"""The HTTP frontend's process. Its starter (eprt's launcher, or rank 0 under mpirun) hands it open sockets and, on
standard input, its options.

Its states: loading, serving, draining (after SIGTERM, SIGINT, or when a rank was signalled), stopping; or lost, when a
rank is gone: then it tells every client, answers /health for a few seconds and exits with status 1. mpirun waits for
it, because it keeps rank 0's output open; eprt's launcher ends with it. Imports neither torch nor MPI.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence

import msgspec
import uvicorn
import uvloop

from eprt import env
from eprt.engine.sampling_defaults import read_sampling_defaults
from eprt.engine.tokenizer import Tokenizer
from eprt.ep.group.host_board import HostBoard
from eprt.serve.diagnosis.metrics import DiagnosisCollector
from eprt.serve.errors import print_line
from eprt.serve.group_services import GroupServices
from eprt.serve.http.api import REQUEST_LOG, Api
from eprt.serve.http.connection import Connection, raise_descriptor_limit
from eprt.serve.http.origins import with_origins
from eprt.serve.http.traffic import Traffic
from eprt.serve.instances.far_joins import FarJoins
from eprt.serve.instances.fleet import Fleet
from eprt.serve.instances.instance import Instance
from eprt.serve.instances.metrics import InstanceCollector
from eprt.serve.instances.scale_metrics import ScaleCollector
from eprt.serve.instances.scaler import Scaler
from eprt.serve.instances.starter import InstanceStarter
from eprt.serve.openai.formats import ModelFormats
from eprt.serve.openai.prepare import Preparer
from eprt.serve.openai.templates import find_template
from eprt.serve.options import LOST, SERVING, FrontendConfig
from eprt.serve.ranks.loading_watch import LOOK_S
from eprt.serve.ranks.metrics import RankCollector
from eprt.serve.ranks.pool import RankPool
from eprt.serve.ranks.request_metrics import RequestMetrics
from eprt.serve.ranks.view_metrics import ViewCollector
from eprt.serve.rebalance.metrics import RebalanceCollector
from eprt.serve.service_manager import tell_service_manager

_log = logging.getLogger(__name__)

# How long ranks may take to leave: the step under way, then freeing their shared memory.
_LEAVE_TIMEOUT_S = 30
_LAST_MESSAGE_S = 0.3
_LOST_GRACE_S = 3.0  # how long /health reports a lost rank before the server exits
# The launcher forwards Ctrl-C as SIGUSR1 (launch.py): the signal's bare name would puzzle whoever pressed it.
_REASONS = {"SIGUSR1": "asked to stop (SIGUSR1)"}


class _Server(uvicorn.Server):
    """uvicorn, without its signal handlers: a signal means drain."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


class Frontend:
    """Everything that the frontend's process runs: HTTP, the pool of ranks, diagnosis and rebalancing."""

    def __init__(self, config: FrontendConfig):
        self._options = options = config.options
        metrics = RequestMetrics(options.tiers)
        self._groups: dict[str, GroupServices] = {}  # by instance; "": the server is one
        self._pool: RankPool | Fleet
        self._http = socket.socket(fileno=config.http_fd)
        if options.num_instances:
            self._pool = self._make_fleet(config, metrics)
        else:
            self._pool = pool = RankPool(config, metrics, on_drain=self.drain)
            self._groups[""] = group = GroupServices(options, pool)
            for collector in (
                RankCollector(pool, options),
                ViewCollector(pool.roster, pool.sequences),
                DiagnosisCollector(group.diagnosis, config.num_ranks),
                RebalanceCollector(group.rebalancer),
            ):
                metrics.registry.register(collector)
        model_dir = options.engine.model_dir
        tokenizer = None if options.skip_tokenizer_init else Tokenizer(model_dir)
        template = find_template(model_dir, tokenizer, options.chat_template) if tokenizer else None
        parsers = options.tool_call_parser, options.reasoning_parser
        formats = ModelFormats.from_checkpoint(tokenizer, template, *parsers) if tokenizer else ModelFormats()
        preparer = Preparer(
            options.model_name,
            tokenizer,
            template,
            self._pool.max_sequences,
            formats,
            options.model_aliases,
            defaults=read_sampling_defaults(options.engine),
            trusts_templates=options.trust_request_chat_template,
        )
        self._notify_fd, self._board_fd = config.notify_fd, config.board_fd
        api = Api(options, self._pool, preparer, self._groups, config.keys)
        self._has_key = bool(config.keys.clients)
        app = with_origins(Traffic(api.app(), api.routes, metrics.registry), options.allowed_origins)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
                timeout_keep_alive=options.keep_alive_s,  # type: ignore[arg-type]  # given to call_later alone
                timeout_graceful_shutdown=5,
            )
        )
        self._signalled: set[int | None] = set()
        self._hurry = asyncio.Event()

    def _make_fleet(self, config: FrontendConfig, metrics: RequestMetrics) -> Fleet:
        options = config.options
        fleet = Fleet(config, metrics, on_drain=self.drain)
        fleet.on_instance.append(self._serve_instance)
        fleet.on_left.append(lambda instance: self._groups.pop(instance.name.name).end())
        fleet.far_joins = FarJoins(config) if options.join_address is not None else None
        fleet.starter = InstanceStarter(options, self._url(), self._http.getsockname()[1])
        self._scaler = Scaler(fleet, options) if options.scale != "off" else None
        for collector in (InstanceCollector(fleet, options), ScaleCollector(self._scaler)):
            metrics.registry.register(collector)
        return fleet

    def _serve_instance(self, instance: Instance) -> None:
        """An instance begins to load; a predecessor of its name is lost."""
        name = instance.name.name
        if name in self._groups:
            self._groups[name].end()
        self._groups[name] = GroupServices(self._options, instance.pool, name)
        self._groups[name].start()

    async def run(self) -> int:
        """Returns the exit status when the ranks have left or are lost."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain, signal.Signals(number).name)
        await self._pool.listen()
        serving = loop.create_task(self._server.serve(sockets=[self._http]))
        announcing = loop.create_task(self._announce())
        watching = [loop.create_task(watch) for watch in self._watches()]
        await self._pool.ended.wait()
        for group in self._groups.values():
            await group.close_window()
        status = 0
        if self._pool.state == "lost":
            status = 1
            self._notify(LOST + self._pool.reason.replace("\n", " ").encode() + b"\n")
            if self._pool.ready.is_set():
                await asyncio.sleep(_LOST_GRACE_S)
        announcing.cancel()
        for group in self._groups.values():
            group.end()
        for task in watching:
            task.cancel()
        self._server.should_exit = True
        await serving
        return status

    def _watches(self) -> Sequence[Coroutine]:
        """What looks after the ranks until the end."""
        if isinstance(self._pool, Fleet):
            return [self._pool.watch(), *([self._scaler.run()] if self._scaler is not None else [])]
        self._groups[""].start()
        elasticity = self._pool.elasticity
        watches = [elasticity.watch_processes(), self._watch_loading(self._pool)]
        if self._board_fd is not None:
            watches.append(elasticity.watch_lives(HostBoard(self._board_fd, self._pool.num_ranks)))
        return watches

    async def _watch_loading(self, pool: RankPool) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            pool.look_at_loading()

    async def _announce(self) -> None:
        await self._pool.ready.wait()
        self._notify(SERVING)
        num = self._pool.num_ranks
        name, ranks = self._options.model_name, f"{num} rank{'' if num == 1 else 's'}"
        if isinstance(self._pool, Fleet):
            print_line(f"eprt instances: {', '.join(map(str, self._pool.living))}", sys.stdout)
            if self._pool.far_joins is not None:
                print_line(f"eprt instances of other hosts: port {self._pool.far_joins.port}", sys.stdout)
        engine, url = self._options.engine, self._url()
        if engine.attention_tp > 1:
            form = engine.attention_tp_form
            print_line(f"eprt: teams of {engine.attention_tp} ranks share attention (form {form})", sys.stdout)
        print_line(f"eprt serving {name} on {url}, {ranks}", sys.stdout)
        tell_service_manager(f"serving {name} on {url}, {ranks}", "READY=1")
        path, asks = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
        if self._options.skip_tokenizer_init:
            path, asks = "completions", '"prompt": [1, 2, 3]'
        key = " -H 'Authorization: Bearer KEY'" if self._has_key else ""
        body = f'{{"model": "{name}", {asks}}}'
        print_line(f"    curl {url}/v1/{path}{key} -d '{body}'", sys.stdout)

    def _notify(self, line: bytes) -> None:
        """A line to eprt's launcher."""
        if self._notify_fd is not None:
            with contextlib.suppress(BrokenPipeError):  # it is gone
                os.write(self._notify_fd, line)

    def _url(self) -> str:
        host, port = self._http.getsockname()[:2]
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http{'s' if self._options.ssl_certfile else ''}://{host}:{port}"

    # -- leaving --

    def drain(self, reason: str, rank: int | None = None) -> None:
        """Takes no new requests, lets the running ones finish, then stops. The second signal does not wait for them.
        rank: the one that was signalled, None for this process. mpirun signals every rank: one signal in all."""
        pool = self._pool
        reason = _REASONS.get(reason, reason)
        again = rank in self._signalled
        self._signalled.add(rank)
        if pool.state == "loading":
            # The ranks got the signal too and exit amid their work: there is nothing to stop together. Or mpirun sent
            # it because one of them failed: then that rank's last message is on its way, and is waited for.
            pool.set_state("stopping", "the server is stopping")
            asyncio.get_running_loop().call_later(_LAST_MESSAGE_S, self._stop_loading, reason)
        elif pool.state == "serving":
            pool.set_state("draining", "the server is stopping")
            self._draining = asyncio.get_running_loop().create_task(self._drain(reason))
        elif pool.state == "draining" and again:
            self._hurry.set()

    def _stop_loading(self, reason: str) -> None:
        if not self._pool.ended.is_set():
            _log.info("%s while the model loads: stopping", reason)
            tell_service_manager(f"{reason} while the model loads: stopping", "STOPPING=1")
            self._pool.ended.set()

    async def _drain(self, reason: str) -> None:
        pool, timeout_s = self._pool, self._options.drain_timeout_s
        if pool.num_sequences:
            _log.info("%s: up to %g s for running sequences: %d", reason, timeout_s, pool.num_sequences)
        else:
            _log.info("%s: stopping", reason)
        tell_service_manager(f"{reason}: running sequences: {pool.num_sequences}", "STOPPING=1")
        quiet, hurry = asyncio.ensure_future(pool.wait_quiet()), asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((quiet, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (quiet, hurry):
            waiting.cancel()
        if pool.state == "lost":
            return
        if num_ended := pool.end_sequences():
            _log.warning("%d sequences did not finish in time; they end with finish_reason abort", num_ended)
        for group in self._groups.values():
            await group.rebalancer.close()
        pool.stop()
        try:
            await asyncio.wait_for(pool.ended.wait(), _LEAVE_TIMEOUT_S)
        except TimeoutError:
            remaining = ", ".join(str(rank) for rank in pool.members if not rank.left)
            pool.lose(f"{remaining}, told to leave, did not within {_LEAVE_TIMEOUT_S} s,", "and is given up")


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontendConfig)
    raise_descriptor_limit()
    level = env.get("EPRT_LOG_LEVEL").upper()
    logging.basicConfig(level=level, format="%(asctime)s eprt: %(message)s", stream=sys.stderr)
    if not config.options.request_log:
        logging.getLogger(REQUEST_LOG).setLevel(logging.ERROR)
    for name in ("uvicorn.error", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))

    async def run() -> int:
        try:
            frontend = Frontend(config)
        except (ValueError, OSError) as error:
            print_line(f"eprt serve: error: {error}")
            return 1
        return await frontend.run()

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
