"""What every rank does in test_overlap.py: steps with overlap beside the same steps without, on GPUs."""

from itertools import product

from eprt import LLM, EPGroup, SamplingParams
from tests.gpu.cases_model import DEMO, TEXTS
from tests.recorded import can_record, check_replays

OVERLAPS = (
    {"overlap": "sbo"},
    {"overlap": "sbo", "overlap_sms": 4},  # outputs sent tile by tile
    {"overlap": "tbo"},
    {"overlap": "none"},
)
GRAPHS, NO_GRAPHS = {"graph_sizes": (1, 4, 8)}, {"graph_sizes": ()}
# Fewer requests on later ranks; in the end some ranks decode one sequence, others none.
PARAMS = [SamplingParams(max_tokens=8 + 8 * (i % 4), temperature=0, ignore_eos=True) for i in range(len(TEXTS))]


def generate(group: EPGroup, dtype: str, overlap: str, **options) -> list[list[int]]:
    """Greedy tokens of every prompt; the steps must have had that overlap."""
    options = {"kv_cache_gb": 0.02, "max_num_seqs": 8, "chunk_size": 64, **options}
    with LLM(DEMO, group, device="cuda", dtype=dtype, overlap=overlap, **options) as llm:
        outputs = llm.generate(TEXTS, PARAMS)
        llm.engine.check_integrity()
        steps = llm.engine.stats()
        assert (steps.num_two_batch_steps > 0) == (overlap == "tbo"), steps
        assert (steps.num_single_batch_steps > 0) == (overlap == "sbo"), steps
        if options["graph_sizes"] and can_record(llm.engine.model):
            check_replays(llm.engine)
    return [output.outputs[0].token_ids for output in outputs]


def same_tokens(group: EPGroup, dtype: str = "float32", least: float = 1.0) -> None:
    """Every overlap, with graphs and without, with drafts and without: the tokens of none. least: share of completions
    that must be equal; in bfloat16 attention may round otherwise where it has other requests beside it."""
    want = generate(group, dtype, "none", **GRAPHS)
    steps = ((GRAPHS, 0), (GRAPHS, 2), (NO_GRAPHS, 0), (NO_GRAPHS, 1))
    for overlap, (graphs, drafts) in product(OVERLAPS, steps):
        got = generate(group, dtype, **overlap, num_speculative_tokens=drafts, **graphs)
        same = sum(a == b for a, b in zip(got, want))
        if group.rank == 0:
            print(f"{dtype} {overlap} {graphs} {drafts} drafts: {same} of {len(want)} completions equal", flush=True)
        assert same >= least * len(want), (overlap, graphs, drafts, got, want)
