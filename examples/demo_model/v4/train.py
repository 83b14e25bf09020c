"""Train the V4 demo model, beginning with what the V3 demo model knows, and write its checkpoint.

    python -m examples.demo_model.v4.train run/demo_v4

One thread of a CPU is enough. Besides the losses of the next token and of MTP's, the older model's hidden states are a
target at first, and the indexers learn which entries attention reads. For the last part experts see their weights in
four bits. The state is kept in DIRECTORY/state.pt now and then; the same command goes on from it.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from .. import dataset
from ..checkpoint import load_checkpoint
from ..model import DemoModel
from ..tokenizer import save_tokenizer
from .attention import DemoV4Config
from .checkpoint import save_v4_checkpoint
from .fp4 import fake_quantise
from .model import DemoV4Model, Gate, MoE
from .warm_start import warm_start

TEACHER = Path(__file__).parents[1] / "checkpoint"
MTP_LOSS_WEIGHT, INDEX_LOSS_WEIGHT, HIDDEN_LOSS_WEIGHT = 0.3, 0.05, 0.3
HIDDEN_LOSS_UNTIL = 0.6  # share of the steps
WARMUP_STEPS = 20
BALANCE_RATE = 1e-3
WARM_START_ROWS = 40
BLOCKS_AT_ONCE = 256  # of training data that are made in one go


@dataclass
class Losses:
    """In nats per token; the hidden states' relative to their squares."""

    loss: Tensor
    mtp: Tensor
    hidden: Tensor
    index: Tensor

    def total(self, hidden_weight: float) -> Tensor:
        mtp, index = MTP_LOSS_WEIGHT * self.mtp, INDEX_LOSS_WEIGHT * self.index
        return self.loss + mtp + index + hidden_weight * self.hidden


def compute_losses(model: Any, teacher: DemoModel | None, token_BL: Tensor, trained_BL: Tensor) -> Losses:
    following = token_BL.roll(-1, 1)
    streams = model(token_BL)
    states = model.collapsed(streams[-1]), model.forward_mtp(streams[-1], following)
    targets, parts = token_BL.masked_fill(~trained_BL, -100), []
    for offset, hidden in enumerate(states, 1):
        wanted = targets.roll(-offset, 1)
        wanted[:, -offset:] = -100
        chosen = wanted >= 0
        parts.append(F.cross_entropy(model.head(hidden[chosen]).float(), wanted[chosen]))
    indexers = [layer.attn.index_loss for layer in model.layers if layer.attn.index_loss is not None]
    hidden_loss = torch.zeros(())
    if teacher is not None:
        pairs = zip(_hidden_states(teacher, token_BL), streams[1:])
        hidden_loss = torch.stack([_difference(old, new) for old, new in pairs]).sum()
    return Losses(parts[0], parts[1], hidden_loss, torch.stack(indexers).sum())


@torch.no_grad()
def _hidden_states(teacher: Any, token_BL: Tensor) -> list[Tensor]:
    """Behind each layer."""
    states: list[Tensor] = []
    layers = teacher.model.layers[: teacher.config.num_hidden_layers]
    hooks = [layer.register_forward_hook(lambda _, __, out: states.append(out)) for layer in layers]
    teacher(token_BL)
    for hook in hooks:
        hook.remove()
    return states


def _difference(old_BLH: Tensor, new_BLMH: Tensor) -> Tensor:
    old = old_BLH.float()
    return (new_BLMH.float().mean(2) - old).square().mean() / old.square().mean()


class Blocks:
    """Rows of training data; made here, since that takes a hundredth of the time of training on them."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self._tokenizer, self._seed, self._blocks = tokenizer, seed, torch.zeros(0, dtype=torch.int64)

    def draw(self, num_tokens: int, row_tokens: int) -> tuple[Tensor, Tensor]:
        """Token ids and whether they are trained on, [rows, row_tokens]. A row begins where a block does."""
        wanted = max(num_tokens, dataset.BLOCK_TOKENS)
        if len(self._blocks) < wanted:
            made = dataset.make_blocks(self._tokenizer, self._seed, BLOCKS_AT_ONCE)
            self._seed += 1
            self._blocks = torch.from_numpy(made.astype("int64")).flatten()
        values, self._blocks = self._blocks[:wanted].view(-1, row_tokens), self._blocks[wanted:]
        return values & (dataset.TRAINED_BIT - 1), values >= dataset.TRAINED_BIT


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-10, fused=True)


class Trainer:
    def __init__(self, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        self.args, self.step, self.curve = args, 0, []
        self.tokenizer = Tokenizer.from_file(str(TEACHER / "tokenizer.json"))
        self.teacher: DemoModel | None = load_checkpoint(TEACHER, dtype=torch.float32)
        self.blocks = Blocks(self.tokenizer, args.seed * 1_000_000)
        self.state_file = args.out / "state.pt"
        if self.state_file.exists():
            state = torch.load(self.state_file)
            self.step, self.curve = state["step"], state["curve"]
            self.blocks = Blocks(self.tokenizer, args.seed * 1_000_000 + 1000 + self.step)
            self.model = DemoV4Model(DemoV4Config())
            self.model.load_state_dict(state["model"])
        else:
            token_ids, _ = self.blocks.draw(WARM_START_ROWS * 256, 256)
            self.model = warm_start(self.teacher, token_ids)
        self.optimizer = make_optimizer(self.model, args.lr)
        if self.step:
            self.optimizer.load_state_dict(state["optimizer"])

    def train(self) -> None:
        self.model.train()
        gates = [module for module in self.model.modules() if isinstance(module, Gate)]
        while self.step < self.args.steps:
            share_done, began = self.step / self.args.steps, time.process_time()
            self._enter(share_done)
            row_tokens = 512 if self.step % 4 == 3 else 256
            hidden_weight = HIDDEN_LOSS_WEIGHT * max(0.0, 1 - share_done / HIDDEN_LOSS_UNTIL)
            rate = self.args.lr * min(1.0, (self.step + 1) / WARMUP_STEPS) * max(0.02, 1 - share_done)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", torch.bfloat16):
                losses = compute_losses(self.model, self.teacher, *self.blocks.draw(self.args.batch_tokens, row_tokens))
            losses.total(hidden_weight).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            skew = max(float(gate.num_tokens_E.max() / gate.num_tokens_E.mean()) for gate in gates)
            for gate in gates:
                gate.balance(BALANCE_RATE * rate / self.args.lr)
            self.step += 1
            if self.step % self.args.report_steps == 1:
                self._report(losses, skew, time.process_time() - began)
            if self.step % self.args.save_steps == 0 or self.step == self.args.steps:
                self._save()

    def _enter(self, share_done: float) -> None:
        """What changes on the way."""
        if share_done >= HIDDEN_LOSS_UNTIL:
            self.teacher = None
        if share_done >= self.args.quantise_from:
            for module in self.model.modules():
                if isinstance(module, MoE):
                    module.fake_quantise = fake_quantise

    def _report(self, losses: Losses, skew: float, seconds: float) -> None:
        values = {name: round(float(value.detach()), 4) for name, value in vars(losses).items()}
        line = {"step": self.step, **values, "skew": round(skew, 2), "cpu_s": round(seconds, 2)}
        self.curve.append(line)
        print(time.strftime("%H:%M:%S"), json.dumps(line), flush=True)

    def _save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial = self.state_file.with_suffix(".partial")
        torch.save({**state, "step": self.step, "curve": self.curve}, partial)
        partial.rename(self.state_file)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", default=Path("run/demo_v4"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--quantise-from", type=float, default=0.3, help="share of the steps before four bits")
    parser.add_argument("--report-steps", type=int, default=10)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    trainer.train()
    save_tokenizer(trainer.tokenizer, args.out)
    save_v4_checkpoint(trainer.model, args.out)
    (args.out / "metrics.json").write_text(json.dumps({"curve": trainer.curve}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
