"""ModelCost: bytes and operations of a model's layers, by the shapes in its config.json.

Attention is counted in absorbed form for decodes: every head multiplies with the latents themselves. Knows no GPU.
"""

from dataclasses import dataclass

from eprt.cluster.crossings import ExpertChoice
from eprt.config import ModelConfig

_BF16 = 2
_SCALE_BLOCK = 128  # values of a row that share an fp32 scale in fp8


@dataclass(frozen=True)
class ModelCost:
    config: ModelConfig
    expert_itemsize: float = 1.0  # bytes of an expert's weight: 1 in fp8 and int8, 2 in bf16
    dense_itemsize: float = 1.0  # of the other matrices in layers

    def __post_init__(self):
        if self.config.moe is None:
            raise ValueError("this model has no experts: there is nothing to spread over a cluster")
        if self.config.indexer is not None or self.config.v4 is not None:
            raise ValueError(
                f"model_type={self.config.model_type!r} is not planned: what its sparse attention "
                "costs was not measured; DeepSeek V2, V3 and R1 are planned"
            )

    @property
    def moe(self):
        assert self.config.moe is not None
        return self.config.moe

    @property
    def gate(self) -> ExpertChoice:
        moe = self.moe
        groups = moe.n_group if moe.n_group > 1 else 1
        return ExpertChoice(moe.num_experts, moe.top_k, groups, moe.topk_group if groups > 1 else 1)

    @property
    def num_moe_layers(self) -> int:
        return self.config.num_hidden_layers - self.config.first_k_dense_replace

    # ---- weights

    @property
    def expert_values(self) -> int:
        return 3 * self.config.hidden_size * self.moe.intermediate_size

    @property
    def shared_values(self) -> int:
        return 3 * self.config.hidden_size * self.moe.shared_intermediate_size

    @property
    def attention_values(self) -> int:
        """Of the matrices that every token of a layer goes through, kv_b in absorbed form included."""
        c = self.config
        query = c.num_attention_heads * c.qk_head_dim
        down_q = c.hidden_size * c.q_lora_rank + c.q_lora_rank * query if c.q_lora_rank else c.hidden_size * query
        absorbed = c.num_attention_heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
        output = c.num_attention_heads * c.v_head_dim * c.hidden_size
        return down_q + c.hidden_size * c.kv_dim + absorbed + output

    @property
    def dense_values(self) -> int:
        """Of the first layers' MLPs, each."""
        return 3 * self.config.hidden_size * self.config.intermediate_size

    def dense_bytes(self) -> float:
        """What every GPU holds whole."""
        c = self.config
        layers = c.num_hidden_layers * self.attention_values + self.num_moe_layers * self.shared_values
        layers += c.first_k_dense_replace * self.dense_values
        return layers * self.dense_itemsize + 2 * c.vocab_size * c.hidden_size * _BF16

    @property
    def expert_bytes(self) -> float:
        """Of one expert in one layer."""
        return self.expert_values * self.expert_itemsize

    @property
    def cache_bytes(self) -> int:
        """Of a cached token, all layers, in bf16."""
        return self.config.kv_dim * _BF16 * self.config.num_hidden_layers

    # ---- messages

    @property
    def dispatch_bytes(self) -> int:
        """Of a token in fp8: values, scales and 16 bytes of header."""
        hidden = self.config.hidden_size
        return hidden + 4 * -(-hidden // _SCALE_BLOCK) + 16

    @property
    def combine_bytes(self) -> int:
        return self.config.hidden_size * _BF16

    # ---- operations of a token and a layer

    def attention_flops(self, context: float) -> float:
        """Of the scores and values of a decode over `context` tokens."""
        return 2.0 * context * self.config.num_attention_heads * (self.config.kv_dim + self.config.kv_lora_rank)

    def prompt_flops(self, context: float) -> float:
        """Of a prompt's token in a MoE layer, with the mean of `context` tokens in front of it, heads expanded."""
        c = self.config
        products = self.attention_values + self.shared_values + self.moe.top_k * self.expert_values
        return 2.0 * products + 2.0 * context * c.num_attention_heads * (c.qk_head_dim + c.v_head_dim)
