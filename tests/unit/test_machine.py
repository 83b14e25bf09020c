"""Facts about this machine, and about made-up ones."""

from pathlib import Path

from eprt import machine
from eprt.cpu_topology import parse_cpus


def test_isa_levels_need_every_flag_and_every_level_below(tmp_path):
    def levels(*flags: str) -> tuple[str, ...]:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {' '.join(flags)}\n")
        return machine.isa_levels(tmp_path / "cpuinfo")

    avx2, avx512, amx = (sorted(machine.ISA_FLAGS[name]) for name in ("avx2", "avx512", "amx"))
    assert levels("sse") == ("scalar",) == machine.isa_levels(tmp_path / "missing")
    assert levels(*avx2) == ("scalar", "avx2")
    assert levels(*avx2, *avx512, *amx) == ("scalar", "avx2", "avx512", "amx")
    assert levels(*avx2, *avx512[1:], *amx) == ("scalar", "avx2")


def test_machine_counts_what_the_kernel_lists():
    online = parse_cpus(Path("/sys/devices/system/cpu/online").read_text())
    assert 1 <= machine.describe().num_cores <= machine.describe().num_cpus <= len(online)
