"""Another process on the same GPUs: it computes on one, or copies from one to another, by ordinary kernels and copies.

It prints "ready" once it is loaded; then it reads "on" and "off", a line each, from standard input.

    python -m benchmarks.diagnosis.gpu_disturbance compute 1          bf16 products on GPU 1
    python -m benchmarks.diagnosis.gpu_disturbance copy 1 0           copies from GPU 1 to GPU 0
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType

import torch

_COPY_BYTES = 256 << 20


def products(gpu: int) -> Callable[[], None]:
    """A call of some milliseconds."""
    a, b = (torch.randn(4096, 4096, device=f"cuda:{gpu}", dtype=torch.bfloat16) for _ in range(2))
    return lambda: [torch.mm(a, b) for _ in range(20)] and torch.cuda.synchronize(gpu)


def copies(source: int, target: int) -> Callable[[], None]:
    """A call of some milliseconds."""
    x = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    y = torch.empty_like(x, device=f"cuda:{target}")
    return lambda: [y.copy_(x, non_blocking=True) for _ in range(10)] and torch.cuda.synchronize(source)


class Disturbance:
    """Starts the process and switches it on and off. Entering waits until it is ready."""

    def __init__(self, *words: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.diagnosis.gpu_disturbance", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Disturbance":
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"a disturbance ended with {self._process.wait()} before it was ready")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()

    def turn(self, on: bool) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("on\n" if on else "off\n")
        self._process.stdin.flush()


def main(words: list[str]) -> None:
    kind, *gpus = words
    work = {"compute": products, "copy": copies}[kind](*map(int, gpus))
    work()
    is_on = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            is_on.set() if line.strip() == "on" else is_on.clear()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    while True:
        is_on.wait()
        work()


if __name__ == "__main__":
    main(sys.argv[1:])
