"""Train the demo model and write its checkpoint.

    python -m examples.demo_model.train run/demo_model --device cuda --minutes 8

Main and MTP loss are trained together; experts are balanced by the gate's correction bias, without an auxiliary loss.
Length is set in minutes, not steps: the learning rate follows the clock, so that the schedule ends on any machine.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .checkpoint import load_checkpoint, save_checkpoint
from .decode import answer
from .model import DemoConfig, DemoModel, Gate
from .pool import BlockPool
from .score import format_table, held_out_questions, score
from .tokenizer import build_tokenizer, save_tokenizer

MTP_LOSS_WEIGHT = 0.3
LONG_ROWS_FROM = 0.8
"""Share of the time after which rows are `LONG_ROW_TOKENS` instead of `ROW_TOKENS` long."""
ROW_TOKENS, LONG_ROW_TOKENS = 512, 2048
WARMUP_STEPS = 200
BALANCE_RATE = 1e-3


@dataclass
class Progress:
    """What a training step reports; losses in nats per token."""

    step: int
    elapsed_s: float
    num_tokens: int
    loss: float
    mtp_loss: float
    skew: float  # most loaded expert over mean, the worst layer


def losses(model: DemoModel, token_ids_BL: Tensor, trained_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss of the next token and of MTP's token after it, over positions where these are trained on."""
    hidden = model(token_ids_BL)
    mtp_hidden = model.forward_mtp(hidden, token_ids_BL.roll(-1, 1))
    targets = token_ids_BL.masked_fill(~trained_BL, -100)
    result = []
    for offset, states in ((1, hidden), (2, mtp_hidden)):
        wanted = targets.roll(-offset, 1)
        wanted[:, -offset:] = -100
        result.append(F.cross_entropy(model.lm_head(states).flatten(0, 1).float(), wanted.flatten(), ignore_index=-100))
    return result[0], result[1]


def learning_rate(peak: float, step: int, share_done: float) -> float:
    """Warm up over steps, then fall linearly with time to almost zero."""
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * max(0.01, 1.0 - share_done)


def make_optimizer(model: DemoModel, device: str) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=device == "cuda")


def train(model: DemoModel, pool: BlockPool, args: argparse.Namespace, on_report) -> None:
    """Train in place for `args.minutes`; call `on_report(Progress)` now and then."""
    optimizer = make_optimizer(model, args.device)
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    start = time.monotonic()
    step = num_tokens = 0
    while (elapsed := time.monotonic() - start) < args.minutes * 60:
        share_done = elapsed / (args.minutes * 60)
        row_tokens = LONG_ROW_TOKENS if share_done >= LONG_ROWS_FROM else ROW_TOKENS
        token_ids, trained = pool.draw(max(1, args.batch_tokens // row_tokens), row_tokens)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss, mtp_loss = losses(model, token_ids, trained)
        (loss + MTP_LOSS_WEIGHT * mtp_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = learning_rate(args.lr, step, share_done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        report_now = step % args.report_steps == 0
        skew = max(float(g.num_tokens_E.max() / g.num_tokens_E.mean()) for g in gates) if report_now else 0.0
        for gate in gates:
            gate.balance(BALANCE_RATE * (rate / args.lr))
        step, num_tokens = step + 1, num_tokens + token_ids.numel()
        if report_now:
            on_report(Progress(step, elapsed, num_tokens, loss.item(), mtp_loss.item(), skew))


def evaluate(directory: Path, tokenizer: Tokenizer, device: str, num_prompts: int) -> dict:
    """Held-out accuracy and MTP agreement of a written checkpoint, in bf16."""
    samples = held_out_questions(num_prompts)
    replies, agreement = answer(load_checkpoint(directory, device), tokenizer, samples)
    return score(samples, replies) | {"mtp_agreement": round(agreement, 4)}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out_help = "checkpoint directory to write (default: %(default)s)"
    parser.add_argument("out", type=Path, nargs="?", default=Path("run/demo_model"), help=out_help)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--resume", type=Path, help="checkpoint directory to start from")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=12, help="processes that make training data")
    parser.add_argument("--pool-blocks", type=int, default=800_000, help="blocks of 512 tokens to make at most")
    parser.add_argument("--report-steps", type=int, default=250)
    parser.add_argument("--eval-prompts", type=int, default=3800)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train, export, evaluate; metrics.json keeps the figures and the training curve."""
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json")) if args.resume else build_tokenizer()
    save_tokenizer(tokenizer, args.out)
    pool = BlockPool(args.out / "tokenizer.json", args.pool_blocks, args.workers, args.device, args.seed)
    if args.resume:
        model = load_checkpoint(args.resume, args.device, torch.float32)
    else:
        model = DemoModel(DemoConfig())
        model.init_weights()
        model.to(args.device)
    if args.device == "cuda" and not args.no_compile:
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    curve: list[dict] = []

    def report(progress: Progress) -> None:
        curve.append(vars(progress).copy())
        print(
            f"step {progress.step} {progress.elapsed_s:.0f} s {progress.num_tokens / 1e6:.1f} M tokens "
            f"loss {progress.loss:.4f} mtp {progress.mtp_loss:.4f} skew {progress.skew:.2f} blocks {pool.num_blocks}",
            flush=True,
        )

    train(model, pool, args, report)
    pool.close()
    save_checkpoint(model, args.out)
    start = time.monotonic()
    result = evaluate(args.out, tokenizer, args.device, args.eval_prompts)
    print(format_table(result))
    print(f"MTP agreement {result['mtp_agreement']:.1%}, evaluated in {time.monotonic() - start:.0f} s")
    (args.out / "metrics.json").write_text(json.dumps(result | {"curve": curve}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
