"""The catalogue: benchmarks are found by their constants."""

import re
import sys

from benchmarks.tools import catalogue
from benchmarks.tools.catalogue import FOLDER


def test_benchmarks_are_found_by_their_constants(tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    (room / "plain.py").write_text('"""Plain.\n\nMore."""\nNUM_RANKS = 0\nNAME = "short"\nON_REQUEST = "slow"\n')
    (room / "ranks.py").write_text("import a_missing_module\nNUM_RANKS = (2, 4)\nNEEDS_GPU = True\nNEEDS = 'a peer'\n")
    (room / "helper.py").write_text("X = 1\n")
    plain, ranks = catalogue.find(tmp_path)
    assert (plain.name, plain.summary, plain.needs_gpu, plain.by_default) == ("short", "Plain.", False, False)
    assert plain.commands(["--fast"]) == [[sys.executable, "-m", "benchmarks.room.plain", "--fast"]]
    assert ranks.needs_gpu and not ranks.by_default
    assert [command[:3] for command in ranks.commands([])] == [["mpirun", "-n", "2"], ["mpirun", "-n", "4"]]
    assert catalogue.by_name([plain, ranks]) == {"short": plain, "plain": plain, "ranks": ranks}
    assert plain.line().split()[:4] == ["short", "CPU", "1", "process"] and plain.line().endswith("Plain. [slow]")
    assert ranks.line().split()[:4] == ["ranks", "GPU", "2/4", "ranks"] and ranks.line().endswith("[a peer]")


def test_no_benchmark_is_overlooked():
    """Whatever has a main of its own is a benchmark, or draws or prints what one wrote, or is started by one."""
    tools = {"fault_tables", "generation_picture", "layer_timeline", "gpu_disturbance", "figures"}
    tools |= {"internode_rank", "affinity_rank"}
    runnable = {
        path.stem for path in FOLDER.glob("*/*.py") if re.search(r"^if __name__ ==", path.read_text(), re.MULTILINE)
    }
    found = catalogue.find()
    modules = {one.module.rpartition(".")[2] for one in found}
    assert modules == runnable - tools
    names = [one.name for one in found]
    assert len(set(names)) == len(names) and {"serve", "layer", "bench_ep", "bench_balance", "soak"} <= set(names)
    for one in found:
        assert one.summary.endswith((".", "`.")) and len(one.summary) <= 120, one.name


def test_each_says_what_it_needs():
    known = catalogue.by_name(catalogue.find())
    assert (
        known["bench_ep"].needs_gpu and known["bench_ep"].num_ranks == (2, 4, 8) and "DeepEP" in known["bench_ep"].needs
    )
    assert known["layer"] is known["bench_layer"] and known["serve"].on_request
    assert known["bench_serve"].by_default and not known["bench_faults"].by_default
