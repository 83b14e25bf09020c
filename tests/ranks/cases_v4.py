"""What every rank does in test_v4.py: an engine of a tiny V4 model, requests dealt out to the ranks."""

import json
from pathlib import Path
from typing import Any

from eprt import EngineConfig, EPGroup, SamplingParams
from eprt.engine.engine import Engine

NUM_NEW = 4


def engine_gives_golden_tokens(group: EPGroup, directory: str, num_drafts: int) -> None:
    """Twice: the second time from the prefix cache. Ranks without a request idle."""
    golden = json.loads((Path(directory) / "golden.json").read_text())
    config = EngineConfig(
        directory, chunk_size=160, kv_cache_gb=0.01, max_num_seqs=2, num_speculative_tokens=num_drafts
    )
    engine = Engine(config, group)
    for is_again in (False, True):
        mine = [i for i in range(len(golden)) if i % group.size == group.rank]
        for i in mine:
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_NEW)
            engine.add_request(str(i), golden[i]["prompt"], params)
        outputs = run_until_idle(engine)
        for i in mine:
            assert [output.token_id for output in outputs[str(i)]] == golden[i]["tokens"], (group.rank, i)
            most = (len(golden[i]["prompt"]) - 1) // 256 * 256
            assert not is_again or outputs[str(i)][0].num_cached_tokens == most
    engine.close()


def run_until_idle(engine: Engine) -> dict[str, list[Any]]:
    outputs: dict[str, list[Any]] = {}
    while not (result := engine.step()).all_idle:
        for output in result.outputs:
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs
