"""Picture of bench_generation's decodes: tokens per second and GPU against time per token.

python -m benchmarks.serving.generation_picture benchmarks/results/generation_61x64_2gpu.json    # a PNG beside it
"""

import argparse
import json
from pathlib import Path

# Output tokens/s per GPU within 50 ms per token, 4K in, 1.5K out or alike; see bench_generation.
PUBLISHED = (("published, H800, EP144", 1850.0), ("published, H20, EP16 and EP32", 825.0))
WITHIN_MS = 50.0


def draw(path: Path) -> Path:
    """Every overlap's measurements, the floor with attention's arithmetic, and what others published."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    content = json.loads(path.read_text())
    rows = [row for row in content["rows"] if row["what"] == "decode" and row["ahead"]]
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for overlap, colour, marker in (("sbo", "#0072b2", "o"), ("none", "#e69f00", "s")):
        chosen = [row for row in rows if row["overlap"] == overlap]
        if not chosen:
            continue
        points = [row["itl_ms"] for row in chosen], [row["tokens_per_s_gpu"] for row in chosen]
        name = {"sbo": "eprt", "none": "eprt, without overlap"}[overlap]
        axis.plot(*points, color=colour, marker=marker, label=name, zorder=3)
        for row in chosen if overlap == "sbo" else ():
            axis.annotate(
                f"{row['requests']} requests",
                (row["itl_ms"], row["tokens_per_s_gpu"]),
                xytext=(-8, 6),
                textcoords="offset points",
                ha="right",
                fontsize=8,
            )
    floors = [(row["floor_tensor_ms"], row["requests"] / row["floor_tensor_ms"] * 1e3) for row in rows]
    axis.plot(*zip(*sorted(set(floors))), color="#777777", linestyle=":", label="floor: memory, links, attention")
    for i, (name, tokens_per_s) in enumerate(PUBLISHED):
        axis.plot(WITHIN_MS, tokens_per_s, "D" if i else "^", color="#d55e00" if i else "#009e73", label=name, zorder=3)
    axis.axvline(WITHIN_MS, color="#bbbbbb", linewidth=1, zorder=1)
    axis.set(xlim=(20, 60), ylim=(0, None), xlabel="time per token, ms", ylabel="output tokens/s per GPU")
    config = content["config"]
    axis.set_title(
        f"DeepSeek-V3's shape, {config['input']} tokens in, {config['output']} out, {config['gpus']} {config['device']}"
        f" with {config['experts'] // config['gpus']} experts each",
        loc="left",
        fontsize=10,
    )
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower left")
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws generation.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="of bench_generation")
    for file in parser.parse_args().files:
        print(draw(file))
