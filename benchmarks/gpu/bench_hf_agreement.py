"""How often a transformers model in bfloat16 and the same model with EPMoE name the same next token.

    mpirun -n 2 python -m benchmarks.gpu.bench_hf_agreement [--device cpu]

Both round to bfloat16, each in its own order, so that near ties fall out differently; nearer ties where a model is less
sure. Every position of every rank's prompts counts: the trained demo model on its held-out questions, and tiny random
models of each supported kind, whose logits are all near ties.

agree: share of the positions whose likeliest next token is the same. twice: the same for transformers' model computed
with experts_implementation grouped_mm instead of eager, as a measure of what rounding alone does. kl: mean divergence
of the two distributions in nats.
"""

import argparse
from collections.abc import Iterator

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.compat.hf import replace_moe_blocks
from eprt.gpu.device import take_device
from examples.demo_model.chat import render
from examples.demo_model.evaluate import CHECKPOINT
from examples.demo_model.score import held_out_questions
from examples.patch_hf_model import KINDS, SHAPE

NUM_RANKS = (1, 2, 4)
NEEDS_GPU = True
NEEDS = "transformers"
NUM_QUESTIONS = 32  # of a rank, to the demo model
NUM_PROMPTS, LENGTH = 16, 120  # of a rank, to a random model


def models(group: EPGroup, device: torch.device) -> Iterator[tuple[str, PreTrainedModel, list[Tensor]]]:
    """(name, model, this rank's prompts)."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    asked = held_out_questions(NUM_QUESTIONS * group.size, seed=7)[group.rank :: group.size]
    texts = [render([*sample.messages, {"role": "assistant", "content": sample.answer}]) for sample in asked]
    options = {"dtype": torch.bfloat16, "experts_implementation": "eager"}
    prompts = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    yield "demo", AutoModelForCausalLM.from_pretrained(CHECKPOINT, **options).eval().to(device), prompts
    for name, (config_class, fields) in KINDS.items():
        if config_class in dir(transformers):
            torch.manual_seed(0)
            config = getattr(transformers, config_class)(**SHAPE, **fields)
            generator = torch.Generator().manual_seed(group.rank)
            prompts = [torch.randint(SHAPE["vocab_size"], (1, LENGTH), generator=generator) for _ in range(NUM_PROMPTS)]
            yield name, AutoModelForCausalLM.from_config(config, **options).eval().to(device), prompts


def all_logits(model: PreTrainedModel, prompts: list[Tensor]) -> list[Tensor]:
    """fp32 [T, V] of each prompt."""
    return [model(prompt.to(model.device), use_cache=False).logits[0].float() for prompt in prompts]


def compare(got: list[Tensor], want: list[Tensor]) -> tuple[int, float]:
    """(positions that agree, sum of divergences)."""
    same, divergence = 0, 0.0
    for got_TV, want_TV in zip(got, want, strict=True):
        same += int((got_TV.argmax(-1) == want_TV.argmax(-1)).sum())
        each_TV = want_TV.softmax(-1) * (want_TV.log_softmax(-1) - got_TV.log_softmax(-1))
        divergence += float(each_TV.sum())
    return same, divergence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
    group = EPGroup.from_mpi()
    device = take_device(arguments.device, group)
    kind = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report = BenchmarkReport(
        f"hf_agreement_{group.size}{'gpu' if device.type == 'cuda' else 'cpu'}",
        {"device": kind, "ranks": group.size, "dtype": "bfloat16", "transformers": transformers.__version__},
    )
    for name, model, prompts in models(group, device):
        want = all_logits(model, prompts)
        model.set_experts_implementation("grouped_mm")
        again, _ = compare(all_logits(model, prompts), want)
        layers = replace_moe_blocks(model, group)
        same, divergence = compare(all_logits(model, prompts), want)
        layers[0].close()
        by_rank = group.allgather((same, again, divergence, sum(prompt.shape[1] for prompt in prompts)))
        same, again, divergence, total = (sum(values) for values in zip(*by_rank))
        report.add_row(model=name, positions=total, agree=same / total, twice=again / total, kl=divergence / total)
    if group.rank == 0:
        report.finish()
    group.close()


if __name__ == "__main__":
    main()
