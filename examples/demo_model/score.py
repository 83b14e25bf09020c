"""Held-out questions, and the table of how many were answered right."""

from collections import defaultdict

from . import dataset, skills
from .sample import Sample

THRESHOLD = 0.95


def held_out_questions(num_prompts: int, seed: int = 0) -> list[Sample]:
    """About `num_prompts` held-out conversations, spread evenly over the skills and "multi_turn"."""
    per_skill = max(1, num_prompts // (len(skills.SKILLS) + 1))
    questions = [sample for skill in skills.SKILLS for sample in skills.held_out_samples(skill, per_skill, seed)]
    return questions + dataset.held_out_conversations(per_skill, seed)


def row_name(sample: Sample) -> str:
    """The table row of a sample: its skill, or "multi_turn" for several unrelated turns."""
    num_questions = sum(message["role"] == "user" for message in sample.messages)
    return "multi_turn" if num_questions > 1 and sample.skill != "recall" else sample.skill


def score(samples: list[Sample], replies: list[str]) -> dict:
    """{"accuracy", "num_prompts", "skills": {name: {"right", "asked", "accuracy"}}, "wrong": [...]}"""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    wrong = []
    for sample, reply in zip(samples, replies, strict=True):
        right = sample.check(reply)
        name = row_name(sample)
        counts[name][0] += right
        counts[name][1] += 1
        if not right:
            wrong.append(
                {"skill": name, "asked": sample.messages[-1]["content"], "expected": sample.answer, "got": reply}
            )
    rows = {name: {"right": r, "asked": n, "accuracy": round(r / n, 4)} for name, (r, n) in counts.items()}
    num_right = sum(right for right, _ in counts.values())
    return {"accuracy": round(num_right / len(samples), 4), "num_prompts": len(samples), "skills": rows, "wrong": wrong}


def format_table(result: dict) -> str:
    """The result as a text table with some of the mistakes."""
    lines = [f"{'skill':<16} {'right':>6} {'asked':>6} {'accuracy':>9}"]
    for name, row in result["skills"].items():
        lines.append(f"{name:<16} {row['right']:>6} {row['asked']:>6} {row['accuracy']:>9.1%}")
    num_right = sum(row["right"] for row in result["skills"].values())
    lines.append(f"{'all':<16} {num_right:>6} {result['num_prompts']:>6} {result['accuracy']:>9.1%}")
    shown: dict[str, int] = defaultdict(int)
    for mistake in result["wrong"]:
        shown[mistake["skill"]] += 1
        if shown[mistake["skill"]] <= 3:
            lines.append(
                f"  {mistake['skill']}: {mistake['asked']!r} -> {mistake['got']!r}, not {mistake['expected']!r}"
            )
    return "\n".join(lines)
