"""config.json of models whose shape is measured; weights are made up."""

from pathlib import Path

DEEPSEEK_V3 = Path(__file__).resolve().parent / "deepseek_v3"
