"""The tutorial's programs run as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.launch import ROOT, mpirun

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE | re.DOTALL)


def block(word: str) -> str:
    (found,) = [text for text in BLOCKS if word in text]
    return found


def run(command: list[str]) -> list[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_offline_generation(tmp_path: Path):
    (tmp_path / "offline.py").write_text(block("LLM("))
    answer = "\n".join(run([sys.executable, str(tmp_path / "offline.py")]))
    assert answer.strip()


FAILS_ON_ONE_RANK = """
from eprt import LLM

with LLM("examples/demo_model/checkpoint", kv_cache_gb=0.01) as llm:
    llm.generate("1")
    if llm.group.rank == 1:
        raise KeyError("only here")
    llm.generate("2")
"""


def test_an_error_of_one_rank_that_nobody_catches_ends_them_all(tmp_path: Path):
    """Instead of one waiting for the others to exit, and those for it in the next call."""
    (tmp_path / "fails.py").write_text(FAILS_ON_ONE_RANK)
    command = mpirun(2, str(tmp_path / "fails.py"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0 and "KeyError: 'only here'" in done.stderr


@pytest.mark.slow
def test_epmoe_in_a_transformers_model_gives_each_rank_its_logits(tmp_path: Path):
    """Two ranks with different tokens get what transformers computes for them alone."""
    program = block("EPMoE.from_hf") + block("from eprt.bind import bind")
    (tmp_path / "own_model.py").write_text(program)
    lines = run(mpirun(2, str(tmp_path / "own_model.py")))
    logits = {
        int(r): [float(x) for x in row.split(",")]
        for r, row in re.findall(r"rank (\d): tensor\(\[(.*?)\]", "\n".join(lines))
    }
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / "examples/demo_model/checkpoint", dtype=torch.float32)
    for rank in range(2):
        with torch.no_grad():
            want = model(torch.tensor([[5, 6, 7, rank]])).logits[0, -1, :4]
        torch.testing.assert_close(torch.tensor(logits[rank]), want, atol=1e-3, rtol=1e-3)
