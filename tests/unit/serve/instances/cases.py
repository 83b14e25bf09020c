"""A fleet whose ranks are connections that remember what they were sent."""

from typing import Any
from unittest.mock import Mock

from eprt.engine.outputs import EngineStats, TokenOutput
from eprt.kv.reader import CachePart, HeldPages, PageSource
from eprt.serve.flags import parse_options
from eprt.serve.instances.fleet import Fleet
from eprt.serve.options import FrontendConfig, InstanceName
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.rank import Rank
from eprt.serve.ranks.request_metrics import RequestMetrics
from tests.unit.cases import MODEL

TERMS = msg.HandoffTerms("model", 16, "bf16", 0, "1")
SHORT = ("--max-num-seqs", "2", "--max-queue", "2", "--local-prefill-tokens", "0")


def info(owner: str, **other) -> msg.EngineInfo:
    fields: dict[str, Any] = {"vocab_size": 99, "max_model_len": 512, "kv_tokens": 1024, "terms": TERMS} | other
    return msg.EngineInfo(
        node_of_rank=(0,), num_experts=0, moe_layers=(), expert_of_slot=[], page_owner=owner, **fields
    )


def held(num_pages: int = 1, owner: str = "p") -> HeldPages:
    source = PageSource("memory", owner, 1, (CachePart(1, (1, 9, 8)),))
    return HeldPages(source, list(range(num_pages)), [0] * num_pages)


class GivenFleet(Fleet):
    """Its instances of one rank each have loaded."""

    def __init__(self, *flags: str, loads: bool = True):
        self.options = parse_options(["--model", str(MODEL), *SHORT, *flags])
        config = FrontendConfig(self.options, self.options.num_ranks or 0, "token", -1, -1)
        super().__init__(config, RequestMetrics(self.options.tiers), lambda reason, rank: None)
        self.given: dict[str, Rank] = {}  # the latest of each instance
        for name, role, _ in reversed(self.options.instance_plan):
            self.connect(name, role, loads=loads)

    def connect(self, name: str, role: str, incarnation: str = "1", loads: bool = True, **other) -> Rank | None:
        hello = msg.Hello("token", 0, 100 + len(self.given), "host", InstanceName(name, role, incarnation, 1))
        rank = self.on_hello(hello, Mock())
        if rank is not None:
            self.given[name] = rank
            if loads:
                self.on_message(rank, msg.Ready(info(f"{name}-{incarnation}", **other)))
        return rank

    def sent(self, name: str) -> list:
        """To an instance's rank since the last look."""
        transport: Any = self.given[name].transport
        sent = b"".join(call.args[0] for call in transport.write.call_args_list)
        transport.write.reset_mock()
        return msg.Unpacker(msg.ToRank).add_bytes(sent)

    def report(self, name: str, *outputs: TokenOutput, stats: EngineStats | None = None) -> None:
        self.on_message(self.given[name], msg.StepReport(list(outputs), stats))

    def hold(self, name: str, request_id: str, num_pages: int = 1) -> None:
        self.on_message(self.given[name], msg.Held(request_id, held(num_pages)))

    def arrive(self, name: str, request_id: str, num_pulled: int = 1, error: str = "") -> None:
        self.on_message(self.given[name], msg.Arrived(request_id, num_pulled, error))

    def lose_instance(self, name: str) -> None:
        self.on_closed(self.given[name], False)
