"""`--device cuda` without a GPU is told at once, whatever is missing."""

import ctypes
from types import SimpleNamespace

import pytest

from eprt.serve import device_check
from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError
from tests.unit.cases import MODEL


def make_driver(monkeypatch, status: int, num_gpus: int) -> None:
    def count(reference) -> int:
        reference._obj.value = num_gpus
        return status

    driver = SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)


def torch_says(monkeypatch, folder, line: str) -> None:
    (folder / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: str | None = None\n")
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(device_check.importlib.util, "find_spec", lambda name: spec)


def test_the_build_of_torch_comes_first(tmp_path, monkeypatch):
    make_driver(monkeypatch, 0, 8)
    torch_says(monkeypatch, tmp_path, "cuda: Optional[str] = None")
    options = parse_options(["--model", str(MODEL), "--device", "cuda"])
    with pytest.raises(OptionError, match=r"--device cuda: torch is a build for CPUs: .* or use --device cpu"):
        device_check.check_device(options)
    for line in ("cuda: Optional[str] = '13.0'", "cuda = '12.8'", ""):
        torch_says(monkeypatch, tmp_path, line)
        device_check.check_device(options)


@pytest.mark.parametrize(
    "status, num_gpus, why", [(100, 0, "shows no GPU"), (0, 0, "shows no GPU"), (0, 1, None), (3, 0, None)]
)
def test_then_the_driver(tmp_path, monkeypatch, status, num_gpus, why):
    torch_says(monkeypatch, tmp_path, "cuda = '13.0'")
    make_driver(monkeypatch, status, num_gpus)
    found = device_check.why_no_gpu()
    assert found is None if why is None else why in (found or "")


def test_a_host_without_a_driver(tmp_path, monkeypatch):
    torch_says(monkeypatch, tmp_path, "cuda = '13.0'")

    def fail(name):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert "no NVIDIA driver" in (device_check.why_no_gpu() or "")


def test_cpu_and_auto_ask_nothing(monkeypatch):
    monkeypatch.setattr(device_check, "why_no_gpu", lambda: "asked")
    for device in ("cpu", "auto"):
        device_check.check_device(parse_options(["--model", str(MODEL), "--device", device]))


def make_gpus(monkeypatch, uuids: list[bytes], unreachable: tuple[tuple[int, int], ...] = ()) -> None:
    """A driver that shows these GPUs."""

    def fill(reference, value: int) -> int:
        reference._obj.value = value
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda count: fill(count, len(uuids)),
        cuDeviceGet=fill,
        cuDeviceGetUuid_v2=lambda raw, device: bool(ctypes.memmove(raw, uuids[device.value], 16)) - 1,
        cuDeviceCanAccessPeer=lambda can, one, other: fill(can, (one, other) not in unreachable),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)


def test_gpus_have_the_names_that_torch_gives_them(monkeypatch):
    make_gpus(monkeypatch, [bytes(range(16)), bytes(range(16, 32))])
    first, second = "00010203-0405-0607-0809-0a0b0c0d0e0f", "10111213-1415-1617-1819-1a1b1c1d1e1f"
    assert device_check.visible_gpus() == [first, second]

    def fail(name):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert device_check.visible_gpus() == [] and device_check.why_no_peers([0, 1]) == ""


def test_instances_that_find_no_gpus_or_no_way_between_them(tmp_path, monkeypatch):
    torch_says(monkeypatch, tmp_path, "cuda = '13.0'")
    uuids = [bytes([number] * 16) for number in range(3)]
    make_gpus(monkeypatch, uuids, unreachable=((2, 0),))

    def check(*flags: str) -> None:
        device_check.check_device(parse_options(["--model", str(MODEL), "--device", "cuda", *flags]))

    check("--prefill", "1", "--decode", "1")
    with pytest.raises(
        OptionError, match=r"^--prefill 1 --prefill-ranks 2 --decode 2 --decode-ranks 1: 1 x 2 . 2 x 1 = 4"
    ):
        check("--prefill", "1", "--prefill-ranks", "2", "--decode", "2")
    with pytest.raises(OptionError, match=r"^--device cuda: GPU 2 cannot read the memory of GPU 0 "):
        check("--prefill", "1", "--decode", "2")
    monkeypatch.setenv("EPRT_RANKS_PER_GPU", "2")
    make_gpus(monkeypatch, uuids[:2])
    check("--prefill", "1", "--prefill-ranks", "2", "--decode", "2")
