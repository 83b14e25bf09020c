"""Prints the folder which, on PYTHONPATH, makes `import deep_ep` import this package, also in child processes."""

from pathlib import Path

print(Path(__file__).resolve().parents[1] / "redirect")
