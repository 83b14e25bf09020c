"""DeepSeek V4 on several ranks: transformers' tokens, whoever has the request and wherever the experts are."""

import json

import pytest
import torch

from tests import tiny_v4
from tests.ranks.cases_v4 import NUM_NEW
from tests.ranks.launch_host import run_host_ranks
from tests.ranks.launch_torch import assert_all_ended_well


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    model = tiny_v4.make_model(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1)
    more = tiny_v4.mtp_tensors(model)
    path = tiny_v4.save(model, tmp_path_factory.mktemp("v4"), more=more, num_nextn_predict_layers=1)
    tokens = torch.randint(2, 128, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    golden = [{"prompt": prompt, "tokens": greedy(model, prompt)} for prompt in (tokens, tokens[:255], tokens[9:140])]
    (path / "golden.json").write_text(json.dumps(golden))
    return path


@torch.no_grad()
def greedy(model, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("num_ranks", "num_drafts"), [(2, 1), (3, 0)])
def test_every_rank_gives_transformers_tokens(directory, num_ranks, num_drafts):
    arguments = {"directory": str(directory), "num_drafts": num_drafts}
    assert_all_ended_well(run_host_ranks(num_ranks, "tests.ranks.cases_v4:engine_gives_golden_tokens", **arguments))
