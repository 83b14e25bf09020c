"""Structured outputs on GPUs: the CPU's tokens, and answers of the form."""

import json

from eprt import LLM, EPGroup, SamplingParams, StructuredOutputs
from eprt.engine.outputs import CompletionOutput
from tests.gpu.cases_model import DEMO

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 999, "minimum": 0}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputs(json=SCHEMA),
    None,
    StructuredOutputs(regex="[a-f]{8,20}"),
    StructuredOutputs(choice=("one", "two two", "three")),
    StructuredOutputs(grammar='start: "a"+ "b"'),
]
NUM = 15


def generate(group: EPGroup, device: str, temperature: float, **options) -> list[CompletionOutput]:
    """On all ranks. Some requests wait until others have left, and get their rows."""
    params = [
        SamplingParams(max_tokens=60, temperature=temperature, seed=i, structured_outputs=FORMS[i % len(FORMS)])
        for i in range(NUM)
    ]
    with LLM(DEMO, group, device=device, kv_cache_gb=0.02, max_num_seqs=6, chunk_size=64, **options) as llm:
        outputs = [output.outputs[0] for output in llm.generate(["Count to 9.", "Hello", "a"] * (NUM // 3), params)]
        llm.engine.check_integrity()
    assert not any(output.error for output in outputs)
    return outputs


def forms_are_kept(group: EPGroup) -> None:
    """In float32 the greedy tokens are the CPU's, with graphs, overlapping steps and drafts. Drawn ones have the
    forms."""
    want = generate(EPGroup.single(), "cpu", 0, dtype="float32")
    for options in ({}, {"num_speculative_tokens": 2}):
        got = generate(group, "cuda", 0, dtype="float32", **options)
        assert [o.token_ids for o in got] == [o.token_ids for o in want], (options, got, want)
    for options in ({}, {"num_speculative_tokens": 1, "speculative_acceptance": "rejection"}):
        drawn = generate(group, "cuda", 1.5, dtype="bfloat16", **options)
        answers = [json.loads(o.text or "") for o in drawn[:: len(FORMS)] if o.finish_reason == "stop"]
        assert answers, drawn
        for answer in answers:
            assert list(answer) == ["name", "n"] and len(answer["name"]) <= 12 and 0 <= answer["n"] <= 999, answer
        assert all(o.text in ("one", "two two", "three") for o in drawn[3 :: len(FORMS)]), drawn
