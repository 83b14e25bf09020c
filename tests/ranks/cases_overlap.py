"""Steps with overlap against the same steps without, bit for bit: run by test_engine.py on every number of ranks."""

import random

import torch

from eprt import EPGroup
from eprt.config import EngineConfig
from eprt.models.loader import load_model
from tests.paged import PagedRunner

MODES = (("normal", "tbo"), ("low_latency", "tbo"), ("low_latency", "sbo"), ("normal", "sbo"))


def uneven_steps(group: EPGroup, directory: str) -> None:
    """Prompts, decodes and both, other numbers of each on every rank; in turns one rank has one token, another none.

    The cut between the halves falls between requests and into prompts.
    """
    model = load_model(EngineConfig(directory, overlap="tbo"), group)
    runner = PagedRunner(model)
    rng = random.Random(group.rank)
    for step in range(8):
        decodes, prompts = rng.choice([(0, 1), (0, 3), (4, 0), (3, 2), (5, 1)])
        if (step + group.rank) % max(group.size, 3) == 0:
            decodes, prompts = 0, 0
        if (step + group.rank) % max(group.size, 3) == 1:
            decodes, prompts = 1, 0
        requests = [runner.request([rng.randrange(2, 128) for _ in range(12)]) for _ in range(decodes + prompts)]
        for request in requests[:decodes]:
            request.num_done = 11
        work = [(request, 1) for request in requests[:decodes]]
        work += [(request, rng.randrange(1, 13)) for request in requests[decodes:]]
        _fill(runner, group, requests[:decodes])
        wants = {mode: _again(runner, work, mode, "none") for mode in ("normal", "low_latency")}
        for mode, overlap in MODES:
            got = _again(runner, work, mode, overlap)
            assert all(map(torch.equal, got, wants[mode])), (step, decodes, prompts, mode, overlap)
        for request in requests:
            runner.free += request.pages
    model.close()


def _fill(runner: PagedRunner, group: EPGroup, requests: list) -> None:
    """What precedes a decode, computed in one step of all ranks."""
    for request in requests:
        request.num_done = 0
    runner.forward([(request, 11) for request in requests])


def _again(runner: PagedRunner, work: list, mode: str, overlap: str) -> list[torch.Tensor]:
    """One step, after which it has not happened; its cache entries hold no numbers until it is computed anew."""
    result = runner.forward(work, mode, overlap)
    for request, n in work:
        request.num_done -= n
        for position in range(request.num_done, request.num_done + n):
            page = request.pages[position // runner.page_size]
            for cache in runner.cache_L:
                cache.latents[page, position % runner.page_size] = float("nan")
    return result
