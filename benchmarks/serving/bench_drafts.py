"""How many draft tokens of the MTP layer are accepted, and what that saves: the demo model's held-out questions.

    python -m benchmarks.serving.bench_drafts --device cpu

accepted    share of the draft tokens
steps       of all requests together, until the last is answered; fewer: how many times fewer than without drafts

The demo model's MTP layer was trained with the model, and its answers are more predictable than text is. At temperature
1.5 tokens are drawn with a seed: `exact` accepts a draft token that equals the token drawn, `rejection` draws the draft
too (engine/acceptance.py). Published for DeepSeek-V3, one draft token: 85 to 90 % accepted, 1.8 times the tokens per
second (arXiv:2412.19437, 5.4.3).
"""

import argparse

from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt import LLM, SamplingParams
from examples.demo_model.chat import render
from examples.demo_model.score import held_out_questions

NUM_RANKS = 0

CASES = ((0.0, "exact"), (1.5, "exact"), (1.5, "rejection"))


def measure(temperature: float, acceptance: str, num_drafts: int, device: str, num_questions: int) -> dict[str, float]:
    options = {"num_speculative_tokens": num_drafts, "speculative_acceptance": acceptance if num_drafts else "exact"}
    with LLM(DEMO_MODEL, device=device, kv_cache_gb=0.1, **options) as llm:
        prompts = [render(question.messages, question.tools) for question in held_out_questions(num_questions)]
        params = [SamplingParams(max_tokens=64, temperature=temperature, seed=i) for i in range(len(prompts))]
        llm.generate(prompts, params)
        stats = llm.engine.stats()
    return {
        "tokens": stats.num_generated_tokens,
        "drafted": stats.num_drafted_tokens,
        "accepted": stats.num_accepted_tokens / max(1, stats.num_drafted_tokens),
        "steps": stats.num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--questions", type=int, default=44)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    report = BenchmarkReport(f"drafts_{args.device}", {"model": "demo", "questions": args.questions})
    for temperature, acceptance in CASES:
        without = 0.0
        for num_drafts in (0, *args.drafts):
            row = measure(temperature, acceptance, num_drafts, args.device, args.questions)
            without = row["steps"] if num_drafts == 0 else without
            report.add_row(
                temperature=temperature, acceptance=acceptance, drafts=num_drafts, **row, fewer=without / row["steps"]
            )
    report.finish()


if __name__ == "__main__":
    main()
