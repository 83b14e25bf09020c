"""DeepSeek V4 at 65,536 positions: memory for a chunk does not grow with its rows times the context."""

import subprocess
import sys

from tests import tiny_v4
from tests.long_v4 import NUM_POSITIONS, NUM_ROWS


def test_a_chunk_at_64k_positions_needs_no_scores_of_all_entries_at_once(tmp_path):
    """Scores of the indexer for all of its rows would take 128 MiB, by its 8 heads a GiB."""
    ratios = [0, 4, 128]
    sizes = {"num_hidden_layers": 3, "compress_ratios": ratios, "num_hash_layers": 1, "index_n_heads": 8}
    directory = tiny_v4.save(tiny_v4.make_model(**sizes, max_position_embeddings=NUM_POSITIONS), tmp_path)
    command = [sys.executable, "-m", "tests.long_v4", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    scores = NUM_ROWS * (NUM_POSITIONS // 4) * 4
    assert int(done.stdout.split()[-1]) < scores, "bytes"
