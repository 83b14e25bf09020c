"""The proxy's C++ under ThreadSanitizer: rings, the wire's contract, messages, and what ends a wait (stress.cpp)."""

import shutil
import subprocess

import pytest

from tests.ranks.launch import ROOT

CASES = (
    "ring",
    "contract_paced",
    "contract_disturbed",
    "contract_tcp",
    "small_rings_paced",
    "small_rings_tcp",
    "messages_disturbed",
    "messages_tcp",
    "short_room_and_cancel",
    "killed_thread_paced",
    "killed_thread_tcp",
    "silent_rank_paced",
    "silent_rank_tcp",
    "left_rank_paced",
    "left_rank_tcp",
    "broken_connections",
    "refusals",
)


def build(folder, *options: str) -> str:
    program = str(folder / "stress")
    command = ["g++", "-std=c++20", "-O1", "-g", *options, f"-I{ROOT}/csrc", f"-I{ROOT}", "-pthread"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/wire/all.cpp"), "-o", program], capture_output=True, text=True, timeout=600
    )
    if done.returncode != 0 and "cannot find" in done.stderr and "tsan" in done.stderr:
        pytest.skip("g++ has no ThreadSanitizer here (libtsan)")
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return build(tmp_path_factory.mktemp("wire"), "-fsanitize=thread")


def run_case(program: str, case: str) -> subprocess.CompletedProcess:
    # Addresses of a program under ThreadSanitizer must not be drawn too freely; kernels differ in how freely they do.
    plain = ["setarch", "-R"] if shutil.which("setarch") else []
    return subprocess.run([*plain, program, case], capture_output=True, text=True, timeout=600)


def test_every_case_is_run(stress):
    listed = subprocess.run([stress], capture_output=True, text=True, timeout=600)
    assert sorted(listed.stdout.split()) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_case(stress, case):
    done = run_case(stress, case)
    assert done.returncode == 0, f"{case} ended with {done.returncode}:\n{done.stderr[-6000:]}"
