"""The model and the engine on GPUs: transformers' logits, the CPU's tokens, on 1, 2 and 4 ranks; the server."""

import json
import subprocess
import sys
import urllib.request

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 1, reason="needs an NVIDIA GPU")]


def alone(case: str, *args) -> None:
    from eprt import EPGroup
    from tests.gpu import cases_model

    getattr(cases_model, case)(EPGroup.single(), *args)


@pytest.mark.parametrize("case", ["goldens", "fp8_goldens"])
def test_tiny_models_equal_transformers(case, tmp_path):
    alone(case, str(tmp_path))


@pytest.mark.parametrize(
    "case", ["same_tokens_as_on_the_cpu", "overlap_changes_nothing", "bfloat16_is_close", "dummy_weights"]
)
def test_one_gpu(case):
    alone(case)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", ["same_tokens_as_on_the_cpu", "bfloat16_is_close"])
def test_ranks(num_ranks, case):
    """float32 goes through host memory, so ranks may share a GPU."""
    from tests.ranks.launch import run_ranks

    if case == "bfloat16_is_close" and num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} GPUs, there are {NUM_GPUS}")
    print(run_ranks(num_ranks, f"tests.gpu.cases_model:{case}", timeout_s=280))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_server_answers_a_chat(num_ranks):
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} GPUs, there are {NUM_GPUS}")
    from tests.gpu.cases_model import DEMO
    from tests.ranks.launch import ROOT

    port = 8137 + num_ranks
    command = [sys.executable, "-m", "eprt.serve", "-n", str(num_ranks), "--model", str(DEMO), "--device", "cuda"]
    server = subprocess.Popen([*command, "--port", str(port), "--kv-cache-gb", "0.1"], cwd=ROOT)
    try:
        _wait_until_healthy(server, port)
        question = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
        answer = _post(port, "/v1/chat/completions", question)
        assert "42" in answer["choices"][0]["message"]["content"], answer
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0


def _wait_until_healthy(server: subprocess.Popen, port: int, timeout_s: float = 150) -> None:
    import time

    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"not healthy after {timeout_s} s")


def _post(port: int, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
