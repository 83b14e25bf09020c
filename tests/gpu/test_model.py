"""The model and the engine on GPUs: transformers' logits, the CPU's tokens, on 1, 2 and 4 ranks; the server."""

import json
import subprocess
import sys
import urllib.request

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, need_gpus

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU")]


def alone(case: str, *args) -> None:
    from eprt import EPGroup
    from tests.gpu import cases_model

    getattr(cases_model, case)(EPGroup.single(), *args)


@pytest.mark.one_gpu
@pytest.mark.parametrize("case", ["goldens", "fp8_goldens", "fp8_activations", "fp8_cache"])
def test_tiny_models(case, tmp_path):
    alone(case, str(tmp_path))


@pytest.mark.one_gpu
@pytest.mark.parametrize(
    "case",
    ["same_tokens_as_on_the_cpu", "overlap_changes_nothing", "bfloat16_is_close", "int8_weights", "dummy_weights"],
)
def test_one_gpu(case):
    alone(case)


@pytest.mark.one_gpu
def test_every_attention_kernel_in_a_whole_model():
    from eprt import EPGroup
    from tests.gpu.cases_attention import decodes_say_what_prompts_say

    decodes_say_what_prompts_say(EPGroup.single())


@pytest.mark.parametrize("num_ranks", at_ranks(1, 2))
def test_structured_outputs(num_ranks):
    need_gpus(num_ranks)
    from tests.ranks.launch import run_ranks

    run_ranks(num_ranks, "tests.gpu.cases_structured:forms_are_kept", timeout_s=280)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", ["same_tokens_as_on_the_cpu", "bfloat16_is_close", "int8_weights"])
def test_ranks(num_ranks, case):
    """float32 goes through host memory, so ranks may share a GPU."""
    from tests.ranks.launch import run_ranks

    if case != "same_tokens_as_on_the_cpu":
        need_gpus(num_ranks)
    print(run_ranks(num_ranks, f"tests.gpu.cases_model:{case}", timeout_s=280))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_demo_model_is_as_accurate_as_on_the_cpu(num_ranks):
    need_gpus(num_ranks)
    from tests.ranks.launch import run_ranks

    print(run_ranks(num_ranks, "tests.gpu.cases_demo:as_accurate_as_on_the_cpu", timeout_s=280))


@pytest.mark.one_gpu
@pytest.mark.long
def test_the_demo_model_is_right_by_the_kernels_for_hopper():
    need_gpus(1)
    import torch

    from tests.ranks.launch import run_ranks

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    print(run_ranks(1, "tests.gpu.cases_demo:right_by_the_kernels_for_hopper", timeout_s=280))


@pytest.mark.long
@pytest.mark.skipif(MOST_RANKS < 2, reason="needs 2 GPUs")
def test_a_killed_rank_is_named_and_nobody_hangs():
    import os
    import signal
    import time

    from eprt.serve.running import RunningServer
    from tests.gpu.cases_model import DEMO
    from tests.serve.test_lifecycle import Stream, all_tell_of_lost_rank, ranks_of

    with RunningServer(DEMO, 2, "--device", "cuda", "--kv-cache-gb", "0.2") as server:
        streams = [Stream(server.url) for _ in range(6)]
        time.sleep(0.3)
        pid = ranks_of(server.url)[1]
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        all_tell_of_lost_rank(streams, 1, pid, timeout_s=15)
        assert server.wait_exit(30) != 0
        assert "Traceback" not in server.output(), server.output()
        print(f"ended {time.monotonic() - killed_s:.1f} s after the kill")


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=pytest.mark.one_gpu), *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))],
)
def test_the_server_answers_a_chat(num_ranks):
    need_gpus(num_ranks)
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
