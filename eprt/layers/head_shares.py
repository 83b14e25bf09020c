"""HeadShares: which heads of attention, and which columns of its output, each rank of a team computes
(docs/attention-tp.md). Arithmetic alone: every rank finds the same from the model's configuration.
"""

from dataclasses import dataclass
from math import gcd, lcm

from eprt.config import EngineConfig, ModelConfig
from eprt.ops.weight import BLOCK


@dataclass(frozen=True)
class HeadShares:
    """Of each rank of a team, in the order of the ranks."""

    heads: tuple[range, ...]
    columns: tuple[range, ...]  # of attention's output, where ranks gather heads before it (form "gather")
    form: str  # EngineConfig.attention_tp_form

    @property
    def num_ranks(self) -> int:
        return len(self.heads)

    @property
    def gathers(self) -> bool:
        """Whether each rank computes columns of the output, of all heads, instead of its heads' part of all columns."""
        return self.form == "gather"

    @property
    def most_heads(self) -> int:
        return max(map(len, self.heads))

    @property
    def most_columns(self) -> int:
        return max(map(len, self.columns))

    @staticmethod
    def for_config(engine: EngineConfig, config: ModelConfig) -> "HeadShares":
        """As even as they can be: blocks of fp8 weights, which share a scale, stay whole. ValueError where a rank would
        have none, and for models whose attention cannot be split."""
        size, num_heads = engine.attention_tp, config.num_attention_heads
        if config.v4 is not None or config.indexer is not None:
            model = "V4" if config.v4 is not None else "V3.2, whose attention has an indexer"
            raise ValueError(
                f"--attention-tp {size}: attention over several ranks works with DeepSeek V2 and V3 so far, not with "
                f"{model}; leave it out"
            )
        in_blocks = config.quant_method == "fp8"
        together = _heads_of_whole_blocks(config) if in_blocks else 1
        heads = _even_shares(num_heads, together, size)
        if not all(heads):
            most, why = -(-num_heads // together), ""
            if together > 1:
                why = f", {together} of them inseparable, as they share blocks of fp8 weights"
            raise ValueError(
                f"--attention-tp {size}: this model has {num_heads} heads{why}: must be in 1..{most}, so that each "
                "rank has some"
            )
        columns = _even_shares(config.hidden_size, BLOCK if in_blocks else 1, size)
        form = engine.attention_tp_form
        if form == "gather" and not all(columns):
            raise ValueError(
                f"--attention-tp {size}: this model is {config.hidden_size} wide, in fp8 blocks of {BLOCK}: too little "
                "for all ranks; take --attention-tp-form reduce, or fewer"
            )
        return HeadShares(heads, columns, form)


def _heads_of_whole_blocks(config: ModelConfig) -> int:
    """The least number of heads whose rows of q and of kv_b, and whose columns of o, are whole blocks."""
    widths = config.qk_head_dim, config.qk_nope_head_dim + config.v_head_dim, config.v_head_dim
    return lcm(*(BLOCK // gcd(BLOCK, width) for width in widths))


def _even_shares(total: int, together: int, size: int) -> tuple[range, ...]:
    """0..total-1 in order, in multiples of `together`; the last one may be smaller."""
    blocks = -(-total // together)
    ends = [min(total, together * (blocks * i // size)) for i in range(size + 1)]
    return tuple(map(range, ends, ends[1:]))
