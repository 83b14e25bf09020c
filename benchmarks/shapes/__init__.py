"""Models that benchmarks run: the demo model, and config.json files of shapes whose weights are made up."""

from pathlib import Path

DEEPSEEK_V3 = Path(__file__).resolve().parent / "deepseek_v3"
DEEPSEEK_V2_LITE = Path(__file__).resolve().parent / "deepseek_v2_lite"
DEEPSEEK_V4_FLASH = Path(__file__).resolve().parent / "deepseek_v4_flash"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"

# DeepSeek-V3: of the model, of one expert's inner layer, heads, and of a cache entry's two parts.
HIDDEN, WIDTH, HEADS, LATENT, ROPE = 7168, 2048, 128, 512, 64
