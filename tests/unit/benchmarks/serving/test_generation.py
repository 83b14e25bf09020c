"""benchmarks.serving.generation: prompts that pass for computed, against a real engine."""

from benchmarks.serving.generation import only_last_tokens
from eprt import EngineConfig, SamplingParams
from eprt.engine.engine import Engine
from tests.paths import DEMO


def test_of_a_prompt_only_the_last_token_is_computed():
    engine = Engine(EngineConfig(DEMO, dtype="float32"))
    with only_last_tokens(engine):
        engine.add_request("a", list(range(5, 45)), SamplingParams(max_tokens=3, ignore_eos=True))
        assert engine.step(1).num_tokens == 1
    assert [engine.step(1).num_tokens for _ in range(2)] == [1, 1]
    assert not engine.has_work
    engine.add_request("b", list(range(100, 140)), SamplingParams(max_tokens=1))
    assert engine.step(2).num_tokens == 40
    engine.close()
