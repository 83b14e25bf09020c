"""Greedy decoding with the training model, and how often its MTP layer guesses right.

There is no cache: every step computes whole rows. Good enough for a few thousand short replies on one GPU.
"""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import chat
from .model import DemoModel
from .sample import Sample

EOS_ID, PAD_ID = 1, 2


def answer(model: DemoModel, tokenizer: Tokenizer, samples: list[Sample], batch: int = 256) -> tuple[list[str], float]:
    """Replies of the model, and the share of generated tokens that the MTP layer had foreseen."""
    prompts = [tokenizer.encode(chat.render(s.messages, s.tools), add_special_tokens=False).ids for s in samples]
    limits = [len(tokenizer.encode(s.answer).ids) + 16 for s in samples]
    # Rows of like length together; the order of the replies is restored below.
    order = sorted(range(len(samples)), key=lambda i: limits[i])
    replies, num_foreseen, num_drafts = [""] * len(samples), 0, 0
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        token_ids, begin, end = _generate(model, [prompts[i] for i in chosen], max(limits[i] for i in chosen))
        foreseen, drafts = _mtp_agreement(model, token_ids, begin, end)
        num_foreseen, num_drafts = num_foreseen + foreseen, num_drafts + drafts
        for row, i in enumerate(chosen):
            ids = token_ids[row, begin[row] : end[row]].tolist()
            replies[i] = tokenizer.decode([t for t in ids if t != EOS_ID], skip_special_tokens=True)
    return replies, num_foreseen / max(1, num_drafts)


@torch.inference_mode()
def _generate(model: DemoModel, prompts: list[list[int]], max_new_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B, L], and where each reply begins and ends (end mark included), both [B]."""
    device = model.lm_head.weight.device
    begin = torch.tensor([len(prompt) for prompt in prompts], device=device)
    length = int(begin.max()) + max_new_tokens
    padded = [prompt + [PAD_ID] * (length - len(prompt)) for prompt in prompts]
    token_ids = torch.tensor(padded, device=device)
    rows, end = torch.arange(len(prompts), device=device), begin.clone()
    running = torch.ones_like(begin, dtype=torch.bool)
    for _ in range(max_new_tokens):
        hidden = model(token_ids[:, : int(end.max())])
        chosen = model.lm_head(hidden[rows, end - 1]).argmax(-1)
        token_ids[rows[running], end[running]] = chosen[running]
        end += running
        running &= chosen != EOS_ID
        if not running.any():
            break
    return token_ids, begin, end


@torch.inference_mode()
def _mtp_agreement(model: DemoModel, token_ids: Tensor, begin: Tensor, end: Tensor) -> tuple[int, int]:
    """(right, made) drafts: at each generated token, MTP's guess at the next generated one."""
    hidden = model(token_ids[:, :-1])
    drafts = model.lm_head(model.forward_mtp(hidden, token_ids[:, 1:])).argmax(-1)[:, :-1]
    position = torch.arange(2, token_ids.shape[1], device=token_ids.device)
    inside = (position > begin[:, None]) & (position < end[:, None])
    return int(((drafts == token_ids[:, 2:]) & inside).sum()), int(inside.sum())
