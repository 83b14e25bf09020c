"""Where things lie in the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO = str(ROOT / "examples" / "demo_model" / "checkpoint")
DEMO_V4 = str(ROOT / "examples" / "demo_model" / "checkpoint_v4")
