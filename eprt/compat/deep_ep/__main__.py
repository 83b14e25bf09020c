"""Prints the folder that, on PYTHONPATH, makes `import deep_ep` give this package, also in child processes."""

from pathlib import Path

print(Path(__file__).resolve().parents[1] / "redirect")
