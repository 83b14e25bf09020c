"""The house rules that a reader relies on, checked over the sources: who imports whom, who reads the environment, who
knows torch, how long files and functions may get, and that nothing names the machine it was built on."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import ROOT, cycle, imports, module_graph, name, nodes, python_files, repository_files

# Each may import itself and those to its right. What stands at the top of eprt/ (cli, generate, doctor, ...) is in TOP.
LAYERS = ("serve", "engine", "cluster", "models", "layers", "ep", "kv", "ops")
# Leaves: anyone may import them; they import only each other. gpu is what ops and ep launch kernels with.
LEAVES = {
    *("env", "config", "model_config", "cpu_topology", "network_cards", "machine"),
    *("bind", "memory_nodes", "mpirun", "native_library", "dead_host", "door", "fd_desk", "handshake", "lazy"),
}
# Doors into the package for programs and for other libraries' users; nobody inside imports them.
TOP = {"cli", "chat", "generate", "hash_load", "doctor", "probe", "network_probe", "compat", "__main__"}

# EPMoE.from_hf and the like are public names of a layer whose work is done behind a door; `python -m eprt.cluster` is
# `eprt plan-cluster`.
ALLOWED_DOORS = {("eprt/layers/moe.py", "compat"), ("eprt/cluster/__main__.py", "cli")}

# file -> limit, where the general one does not do. Each needs a reason.
LONGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS: dict[str, int] = {}
# file -> packages of an extra, which it imports when it is asked to do what needs them.
EXTRAS = {
    "balancer/plots.py": ("matplotlib",),
    "eprt/cluster/plot.py": ("matplotlib",),
    "diagnostics/log/typed_line.py": ("msgspec",),  # faster with it, the same without
}
PYTHON_LIMIT, FUNCTION_LIMIT, CPP_LIMIT = 400, 60, 500


def part_of(module: str) -> str | None:
    """eprt.ops.linear -> ops; None outside eprt."""
    words = module.split(".")
    return words[1] if words[0] == "eprt" and len(words) > 1 else None


def test_imports_go_one_way():
    wrong = []
    for path in python_files("eprt"):
        own = path.relative_to(ROOT / "eprt").parts[0].removesuffix(".py")
        for line, module in imports(path):
            other = part_of(module)
            if other is None or other == own or other in LEAVES:
                continue
            if own in LEAVES:
                wrong.append(f"{name(path)}:{line}: {own} is a leaf, yet imports {module}")
            elif other in TOP and own not in TOP | {"__init__"} and (name(path), other) not in ALLOWED_DOORS:
                wrong.append(f"{name(path)}:{line}: nobody inside imports {other}")
            elif own in LAYERS and other in LAYERS and LAYERS.index(other) < LAYERS.index(own):
                wrong.append(f"{name(path)}:{line}: {own} imports {other}, against {' -> '.join(LAYERS)}")
            elif own in ("gpu",) and other in LAYERS:
                wrong.append(f"{name(path)}:{line}: gpu launches kernels; it knows nothing of {other}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_a_detour():
    """Imports inside functions count too. What an interface must find by name stands in a table of strings."""
    closed = cycle(module_graph())
    assert closed is None, " -> ".join("/".join(module) for module in closed or ())


def test_no_room_imports_itself_by_a_detour():
    """In every folder: its files and the folders in it, each taken as one, import each other one way only."""
    graph = module_graph()
    wrong = []
    for folder in sorted({module[:depth] for module in graph for depth in range(len(module))}):
        depth, rooms = len(folder), {}
        for module, targets in graph.items():
            if module[:depth] == folder and module[depth] != "__init__":
                inside = {target[depth] for target in targets if target[:depth] == folder and len(target) > depth}
                rooms.setdefault(module[depth], set()).update(inside - {module[depth], "__init__"})
        if closed := cycle(rooms):
            wrong.append(f"{'/'.join(folder) or '.'}: {' -> '.join(closed)}")
    assert not wrong, "\n".join(wrong)


def test_every_part_of_the_package_has_its_place():
    parts = {path.relative_to(ROOT / "eprt").parts[0].removesuffix(".py") for path in python_files("eprt")}
    unplaced = parts - {*LAYERS, *LEAVES, *TOP, "gpu", "__init__"}
    assert not unplaced, f"{unplaced}: say in this file where they stand"


def test_only_placement_and_the_engine_side_know_balancer_and_diagnostics():
    """ep uses placements; engine and serve write the log. models, layers and ops know neither."""
    wrong = []
    for path in python_files("eprt"):
        own = path.relative_to(ROOT / "eprt").parts[0].removesuffix(".py")
        for line, module in imports(path):
            if part_of(module) in ("balancer", "diagnostics") and own in ("models", "ops", "gpu", *LEAVES):
                wrong.append(f"{name(path)}:{line}: {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["balancer", "diagnostics"])
def test_balancer_and_diagnostics_stand_alone(folder):
    wrong = [
        f"{name(path)}:{line}: {module}"
        for path in python_files(folder)
        for line, module in imports(path)
        if module.split(".")[0] not in {folder, "numpy", "scipy", *sys.stdlib_module_names, *EXTRAS.get(name(path), ())}
        or (folder == "diagnostics" and module.split(".")[0] == "scipy")
    ]
    assert not wrong, "\n".join(wrong)


def test_balancer_and_diagnostics_work_without_torch():
    """In a process where torch, mpi4py and scipy cannot be imported."""
    code = """
import sys, tempfile
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "mpi4py", "transformers"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
import eprt.balancer, eprt.diagnostics
placement = eprt.balancer.plan([[1.0, 2.0, 3.0, 4.0]], num_gpus=2)
assert placement.num_slots == 4
with tempfile.TemporaryDirectory() as directory:
    writer = eprt.diagnostics.WindowWriter(directory)
    writer.write(eprt.diagnostics.WindowRecord(0, 1.0, 2.0, 0, 1, [0], 1, [0.0], [0.0], [1], 1.0, [1]))
    log = eprt.diagnostics.read_log(directory)
    assert eprt.diagnostics.Report.of_records(log.records).findings == ()
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


# balancer and diagnostics stand without the rest of eprt: NO_COLOR and TERM, and the keys of the server that they ask.
ENVIRONMENT_READERS = ("eprt/env.py", "diagnostics/text.py", "diagnostics/page/server_source.py", "balancer/remote.py")


def test_only_env_reads_the_environment():
    reads = re.compile(r"\bos\.(environ|getenv|putenv|unsetenv)\b|from os import .*\b(environ|getenv)\b")
    wrong = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in python_files("eprt", "balancer", "diagnostics")
        if name(path) not in ENVIRONMENT_READERS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reads.search(line)
    ]
    assert not wrong, "\n".join(wrong)
    native = [name(path) for path in repository_files(".cpp", ".h", ".cu", ".cuh") if "getenv(" in path.read_text()]
    assert not native, f"{native} read the environment; pass the value from Python"


def test_only_the_operator_tables_include_torch():
    """csrc/ops.cpp and its parts csrc/ops_*.cpp declare the operators; kernels take raw pointers."""
    including = re.compile(r"^\s*#\s*include\s*[<\"](torch|ATen|c10)/", re.MULTILINE)
    users = {name(path) for path in repository_files(".cpp", ".h", ".cu", ".cuh") if including.search(path.read_text())}
    assert "csrc/ops.cpp" in users
    assert all(re.fullmatch(r"csrc/ops(_\w+)?\.cpp", user) for user in users), users


def test_no_code_asks_which_backend_it_has():
    """Backends differ behind Backend; a comparison outside the registry is a hidden second interface."""
    asks = re.compile(r"\bbackend(\.name|_name)?\s*(==|!=|in\s*[(\[{])")
    wrong = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in python_files("eprt")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if asks.search(line.partition("#")[0])
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stay_short():
    too_long = []
    for path in repository_files(".py", ".cpp", ".h", ".cu", ".cuh"):
        limit = LONGER_FILES.get(name(path), PYTHON_LIMIT if path.suffix == ".py" else CPP_LIMIT)
        if path.suffix == ".py" and name(path).startswith("tests/"):
            limit = 2 * PYTHON_LIMIT  # tables of cases; one file per subject is worth more than a limit here
        count = len(path.read_text().splitlines())
        if count > limit:
            too_long.append(f"{name(path)}: {count} lines, limit {limit}")
    assert not too_long, "\n".join(too_long)


def test_functions_stay_short():
    too_long = []
    for path in python_files():
        for node in nodes(path.read_text()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{name(path)}:{node.name}"
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > LONGER_FUNCTIONS.get(where, FUNCTION_LIMIT):
                    too_long.append(f"{where}: {count} lines, limit {LONGER_FUNCTIONS.get(where, FUNCTION_LIMIT)}")
    assert not too_long, "\n".join(too_long)


def test_nothing_names_the_machine_it_was_built_on():
    """No absolute path of somebody's machine; what programs themselves fix (/dev/shm, /proc, /usr/bin) is fine."""
    private = re.compile(r"(?<![\w.~$}])/(work|home|root|Users|mnt|workspace)/[\w.-]+")
    wrong = []
    for path in repository_files():
        if path.suffix in (".safetensors", ".png", ".npz") or path == Path(__file__).resolve():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        wrong += [f"{name(path)}: {match[0]}" for match in private.finditer(text)]
    assert not wrong, "\n".join(wrong)


def test_the_rules_bite(tmp_path):
    """The parser these tests rest on sees what it must."""
    package = ROOT / "eprt" / "ep"
    sample = "import eprt.serve.api\nfrom eprt.engine import llm\n"
    sample += "def f():\n    from . import wait\n    from ..ops import x\n"

    class Source(type(package)):
        def read_text(self, *arguments, **options):
            return sample

    found = dict(imports(Source(package / "sample.py")))
    assert found == {1: "eprt.serve.api", 2: "eprt.engine.llm", 4: "eprt.ep.wait", 5: "eprt.ops.x"}
    assert [part_of(module) for module in found.values()] == ["serve", "engine", "ep", "ops"]
