"""Tables of docs/figures-serving.md that are printed from result files: transformers' block, and small operators.

Knows the columns of bench_hf_moe and of bench_small_operators; measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_TRANSFORMERS = ("eager", "grouped_mm", "batched_mm")
_WORDS = {"deepseek_v3": "DeepSeek-V3", "qwen3_235b": "Qwen3-235B"}
_RECORDED = ("low_latency, graph", "normal, graph")


def hf_moe_table(content: Mapping[str, Any], shape: str) -> str:
    """One shape. Cells of several times are in the order that the head names; - was not run."""
    rows = [row for row in content["rows"] if row["shape"] == shape]
    lines = [
        f"| tokens per GPU, {_WORDS[shape]} on {content['config']['gpus']} | "
        "transformers us: eager, grouped_mm, batched_mm | best, recorded ones too | "
        "EPMoE us: normal, low latency, recorded | times the best | with fp8 experts us | times the best | floor us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        of_size = {row["what"]: row for row in rows if row["tokens"] == tokens}
        cells = [
            str(tokens),
            _times(of_size, [f"transformers {name}" for name in _TRANSFORMERS]),
            f"{_best(of_size, 'transformers ')['layer_us']:.0f}",
        ]
        for word in ("eprt ", "eprt fp8 "):
            launched = [word + name for name in ("normal", "low_latency")]
            recorded = _fastest(of_size, [word + name for name in _RECORDED])
            fastest = _fastest(of_size, [*launched, *recorded])
            cells += [_times(of_size, [*launched, *(recorded or ["none"])]), f"{of_size[fastest[0]]['speedup']:.2f}"]
        lines.append(f"| {' | '.join([*cells, format(_best(of_size, '')['floor_us'], '.0f')])} |")
    return "\n".join(lines)


def _times(of_size: Mapping[str, Row], names: Sequence[str]) -> str:
    return ", ".join(f"{of_size[name]['layer_us']:.0f}" if name in of_size else "-" for name in names)


def _fastest(of_size: Mapping[str, Row], names: Sequence[str]) -> list[str]:
    """One name, or none where nothing of these was run."""
    return sorted((name for name in names if name in of_size), key=lambda name: of_size[name]["layer_us"])[:1]


def _best(of_size: Mapping[str, Row], word: str) -> Row:
    return min((row for name, row in of_size.items() if name.startswith(word)), key=lambda row: row["layer_us"])


def hf_memory_table(content: Mapping[str, Any]) -> str:
    """Weights of a layer on one GPU, and what its largest batch takes beside them."""
    lines = [
        "| shape | transformers: weights, and peak of the largest batch | EPMoE bf16 | EPMoE fp8 |",
        "|---|---|---|---|",
    ]
    rows = content["rows"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        most = max(row["tokens"] for row in rows if row["shape"] == shape)
        largest = {row["what"]: row for row in rows if row["shape"] == shape and row["tokens"] == most}
        kinds = (largest[name] for name in ("transformers grouped_mm", "eprt normal", "eprt fp8 normal"))
        cells = [f"{row['weights_GB']:.1f} GB, {row['peak_MB'] / 1000:.2f} GB" for row in kinds]
        lines.append(f"| {_WORDS[shape]}, {most} tokens | {' | '.join(cells)} |")
    return "\n".join(lines)


def small_operators_table(content: Mapping[str, Any]) -> str:
    """A row per operator, a column per number of rows: eprt us, compiled us, ratio."""
    rows = content["rows"]
    sizes = list(dict.fromkeys(row["rows"] for row in rows))
    heads = [f"{size} row" if size == 1 else f"{size} rows" for size in sizes]
    lines = [f"| operator | {' | '.join(heads)} |", "|---" * (len(sizes) + 1) + "|"]
    for what in dict.fromkeys(row["what"] for row in rows):
        cells = {
            row["rows"]: f"{row['eprt_us']:.1f}, {row['compiled_us']:.1f}, {row['to_compiled']:.2f}"
            for row in rows
            if row["what"] == what
        }
        lines.append(f"| {what} | {' | '.join(cells[size] for size in sizes)} |")
    return "\n".join(lines)
