"""How many bytes a DeepSeek V4 model's weights take on a rank, known from the files' headers.

The arithmetic of deepseek_v4_builder.py. Knows nothing of caches and of communication.
"""

from eprt.models.weight_memory import FLOAT32, WeightMemory, matrix_bytes, num_values
from eprt.ops.weight import BLOCK

_INT64 = 8
_IN_FLOAT32 = ("attn_sink", "ape", "gate.bias")
_AS_IN_FILE = ("gate.weight", "weights_proj.weight", "compressor.wkv.weight", "compressor.wgate.weight")


class V4WeightMemory(WeightMemory):
    def _rotation_bytes(self) -> int:
        """Of two tables."""
        return 2 * super()._rotation_bytes()

    def _tensor_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        itemsize = self._config.dtype.itemsize
        if name.endswith("tid2eid"):
            return num_values(shape) * _INT64
        if name.endswith(_IN_FLOAT32) or name.rpartition(".")[2].startswith("hc_"):
            return num_values(shape) * FLOAT32
        if name.endswith(_AS_IN_FILE):
            return self._bytes_in_file(name)
        if len(shape) == 1 or name in ("embed.weight", "head.weight"):
            return num_values(shape) * itemsize
        if ".shared_experts." in name:
            return self._swiglu_bytes(name, shape)
        weight_format = self._format_of(name)
        if name.endswith("wo_a.weight") and weight_format == "fp8":
            assert self._config.v4 is not None
            weight_format = "same" if self._config.v4.o_lora_rank % BLOCK else "fp8"
        return matrix_bytes(shape, weight_format, itemsize)
