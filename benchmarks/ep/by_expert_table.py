"""The table of docs/figures-communication.md that is printed from ep_normal_by_expert_Ngpu. Measures nothing."""

from collections.abc import Mapping
from typing import Any


def page_table(content: Mapping[str, Any]) -> str:
    """us, and eprt's over each peer's."""
    lines = ["| tokens | call | eprt | DeepEP alone, ratio | with the permutation, ratio |", "|---|---|---|---|---|"]
    for row in content["rows"]:
        peers = (f"{row[f'{name}_us']:.0f}, {row[f'to_{name}']:.2f}" for name in ("deep_ep", "deep_ep_permute"))
        what = row["call"] if "dispatch" in row["call"] else f"{row['call']}, after {row['after']}"
        lines.append(f"| {row['tokens']} | {what} | {row['eprt_us']:.0f} | {' | '.join(peers)} |")
    return "\n".join(lines)
