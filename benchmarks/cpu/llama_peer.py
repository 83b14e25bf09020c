"""llama.cpp's own benchmarks, llama-bench and llama-batched-bench: run, and what they print.

Knows how to start them and to read their JSON; builds nothing.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LlamaPeer:
    """A folder with both programs, and how many threads they get."""

    folder: Path
    threads: int
    repacks: bool = True  # weights may be kept in another order, as its AMX kernels want them

    def version(self) -> str:
        """As llama-bench tells it: commit and build."""
        said = subprocess.run([self.folder / "llama-bench", "--version"], capture_output=True, text=True)
        return " ".join((said.stdout + said.stderr).split())[:200]

    def prompt_seconds(self, model: Path, prompts: Sequence[int]) -> dict[int, float]:
        """By number of tokens, how long a prompt takes. The first is computed twice, to touch the weights once."""
        lengths = ",".join(map(str, (prompts[0], *prompts)))
        command = [self.folder / "llama-bench", "-m", model, "-p", lengths, "-n", "0", "-r", "1", "--no-warmup"]
        command += [] if self.repacks else ["--repack", "0"]
        rows = json.loads(self._run([*command, "-t", str(self.threads), "-o", "json"]))
        return {row["n_prompt"]: row["avg_ns"] / 1e9 for row in rows}

    def decode_seconds(self, model: Path, streams: Sequence[int], prompt: int, tokens: int) -> dict[int, float]:
        """By number of streams, how long a step takes that adds a token to each of them, after prompts of so many."""
        slots = max(streams) * (prompt + tokens)
        command = [self.folder / "llama-batched-bench", "-m", model, "-c", str(slots)]
        command += ["-npp", str(prompt)]
        command += ["-ntg", str(tokens), "-npl", ",".join(map(str, streams)), "-t", str(self.threads)]
        command += [] if self.repacks else ["--no-repack"]
        said = self._run([*command, "--output-format", "jsonl"])
        rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        return {row["pl"]: row["t_tg"] / tokens for row in rows}

    def _run(self, command: Sequence[object]) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout
