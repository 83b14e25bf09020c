"""Recorded steps without a GPU: a replay computes the same again, from and to the same memory."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from eprt.engine import graphs, warm_up
from eprt.engine.engine import Engine
from eprt.ep.exchange import Exchange
from eprt.models.model import Model


@contextmanager
def steps_recorded(engine: Engine, sizes=(1, 2, 4, 8)):
    """The engine replays its steps of decodes, on a CPU. Collective. Nothing may be launched anew in the end."""
    most_rows = engine.scheduler.max_running * (1 + engine.config.num_speculative_tokens)
    most_rows = min(most_rows, engine.config.low_latency_max_tokens)
    num_pages = -(-engine.limits.max_model_len // engine.config.page_size)
    with ExitStack() as stack:
        stack.enter_context(patch.object(graphs, "record", _record))
        stack.enter_context(patch.object(Exchange, "require_recordable", lambda exchange: None))
        stack.enter_context(patch("torch.cuda.graph_pool_handle", lambda: None))
        warm_up.record_decodes(engine.runner, engine.drafter, sizes, most_rows, num_pages, engine.overlap.decode)
    yield
    check_replays(engine)


def can_record(model: Model) -> bool:
    try:
        model.exchange.require_recordable()
    except ValueError:
        return False
    return True


def check_replays(engine: Engine) -> None:
    """Steps of decodes were replayed, and of those that draft each pass of the MTP layer too."""
    assert engine.runner.graphs is not None and engine.runner.graphs.num_replays > 0
    if engine.drafter is not None:
        assert engine.drafter.graphs is not None
        passes = engine.drafter.graphs.num_replays, engine.runner.graphs.num_replays * engine.drafter.num_drafts
        assert passes[0] == passes[1], passes


def _record(compute, pool) -> graphs.Recorded:
    results = compute()

    def replay() -> None:
        for result, new in zip(results, compute()):
            result.copy_(new)

    return graphs.Recorded(replay, results)
