"""DeepSeek V4 behind a server: transformers' log-probabilities, and what the V4 demo model knows."""

import httpx
import pytest
import torch

from eprt.serve.running import RunningServer
from examples.demo_model.evaluate import ask_server
from examples.demo_model.score import held_out_questions, score
from tests import tiny_v4
from tests.paths import DEMO_V4
from tests.serve.processes import PATIENCE_S, PATIENT

NUM_NEW = 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(transformers' model in fp32, its files with an MTP layer, tokens)"""
    model = tiny_v4.make_model(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1)
    more = tiny_v4.mtp_tensors(model)
    folder = tiny_v4.save(model, tmp_path_factory.mktemp("v4"), more=more, num_nextn_predict_layers=1)
    return model, folder, torch.randint(2, 128, (400,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.no_grad()
def log_probs_of(model, tokens: list[int]) -> list[float]:
    """Of each token but the first."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    target = torch.tensor(tokens[1:])
    return logits.log_softmax(-1)[:-1].gather(1, target[:, None])[:, 0].tolist()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_log_probability_is_transformers(tiny, num_ranks):
    """Of prompts and answers, with drafts, and of a prompt whose beginning is in the cache."""
    model, folder, tokens = tiny
    flags = "--skip-tokenizer-init", "--num-speculative-tokens", "1", "--chunk-size", "160", "--kv-cache-gb", "0.01"
    with (
        RunningServer(folder, num_ranks, *flags, variables=PATIENT) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):

        def ask(prompt: list[int], **fields) -> dict:
            common = {"model": server.model, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
            body = {**common, "prompt": prompt, "logprobs": 0, "return_token_ids": True, **fields}
            response = http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        for prompt in (tokens[:300], tokens[9:138]):
            choice = ask(prompt, echo=True)["choices"][0]
            everything = [*prompt, *choice["token_ids"][-NUM_NEW:]]
            got = choice["logprobs"]["token_logprobs"]
            assert len(got) == len(everything) and got[0] is None
            assert got[1:] == pytest.approx(log_probs_of(model, everything), abs=1e-3)
        again = [*tokens[:280], 7, 8, 9]
        for prompt in [again] * num_ranks:  # to whichever rank it goes: one of them has its beginning
            answer = ask(prompt)
            if answer["usage"]["prompt_tokens_details"]["cached_tokens"]:
                break
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
        choice = answer["choices"][0]
        want = log_probs_of(model, [*again, *choice["token_ids"]])[-NUM_NEW:]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(want, abs=1e-3)
        assert "eprt_drafted_tokens_total{" in http.get("/metrics").text


# Bytes of a token: two layers of ratio 4, one of 128; entries of 128 values, 32 rotated; index keys of 64.
ENTRY, INDEX = {"auto": 256, "fp8": 168}, {"auto": 128, "fp4": 36}


@pytest.mark.parametrize("formats", [("auto", "auto"), ("fp8", "fp4")])
def test_the_demo_model_answers_with_drafts_that_are_accepted(formats):
    samples = held_out_questions(44, seed=3)
    flags = "--num-speculative-tokens", "1", "--kv-cache-gb", "0.05"
    flags += "--kv-cache-dtype", formats[0], "--index-cache-dtype", formats[1]
    with RunningServer(DEMO_V4, 4, *flags, variables=PATIENT) as server:
        result = score(samples, ask_server(server.url, samples, concurrency=8, timeout_s=PATIENCE_S))
        text = httpx.get(f"{server.url}/metrics").text
    assert result["accuracy"] >= 0.9, result["wrong"]  # the whole evaluation, of ten times as many, asks for 0.95
    drafted, accepted = (
        sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"eprt_{kind}_tokens_total"))
        for kind in ("drafted", "accepted")
    )
    assert drafted > 300 and accepted > 0.8 * drafted
    token_bytes = 2 * (ENTRY[formats[0]] + INDEX[formats[1]]) / 4 + ENTRY[formats[0]] / 128
    assert text.count(f'eprt_kv_bytes_per_token{{rank="0"}} {token_bytes}') == 1
