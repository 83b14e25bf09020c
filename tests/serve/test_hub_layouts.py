"""Releases of the hub behind a server: what a client sees of them."""

import httpx
import pytest

from eprt.serve.running import RunningServer
from tests import hub_layouts
from tests.serve.processes import PATIENCE_S, PATIENT

NUM_LAYERS = 5
FLAGS = ("--max-model-len", "256", "--kv-cache-gb", "0.02")


@pytest.mark.parametrize(
    ("name", "num_ranks", "flags"),
    [
        ("V2-Lite-Chat", 1, ()),
        ("R1-0528", 2, ("--num-speculative-tokens", "1")),
        ("V3.2-Exp", 2, ("--num-speculative-tokens", "2")),
    ],
)
def test_a_release_serves_chats(name, num_ranks, flags, tmp_path):
    folder = hub_layouts.make_release(name, tmp_path / name, NUM_LAYERS)
    with (
        RunningServer(folder, num_ranks, *FLAGS, *flags, variables=PATIENT) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        question = {"messages": [{"role": "user", "content": "What is 12 + 34?"}], "max_tokens": 4, "ignore_eos": True}
        chat = http.post("/v1/chat/completions", json={"model": name, **question})
        assert chat.status_code == 200, chat.text
        assert chat.json()["usage"]["completion_tokens"] == 4
        text = http.post(
            "/v1/completions", json={"model": name, "prompt": "1 + 1 =", "max_tokens": 3, "ignore_eos": True}
        )
        assert text.status_code == 200, text.text
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [name]
