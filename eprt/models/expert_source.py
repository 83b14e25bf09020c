"""ExpertSource: experts of a model that serves already, from copies in host memory or from its checkpoint once more.

For a rank that is to hold other experts than at the start. Knows names of tensors, and nothing of who asks.
"""

from collections.abc import Sequence

from eprt.layers.moe import EPMoE
from eprt.models.checkpoint import SCALE_SUFFIX, TensorSource
from eprt.models.expert_copies import ExpertCopies
from eprt.models.model import ExpertPlace
from eprt.ops.weight import Weight

MATRICES = ("gate", "up", "down")


class ExpertSource:
    """Where a rank gets experts from.

    Args:
        checkpoint: from which the model was read; its files may be closed.
        copies: that are asked first; None: there are none.
    """

    def __init__(self, checkpoint: TensorSource, copies: ExpertCopies | None = None):
        self._checkpoint, self._copies = checkpoint, copies
        checkpoint.on_read = lambda: None  # nobody watches any more

    def load(self, places: Sequence[ExpertPlace], layers: Sequence[EPMoE]) -> None:
        """Fills the buffers. From a checkpoint several threads read ahead, through all layers."""
        if self._copies is not None:
            places = self._copies.load(places, layers)
        if places:
            self._read(places, layers)

    def _read(self, places: Sequence[ExpertPlace], layers: Sequence[EPMoE]) -> None:
        checkpoint = self._checkpoint
        prefixes = [f"model.layers.{layers[place.row].layer_idx}.mlp.experts.{place.expert}." for place in places]
        names = [f"{prefix}{matrix}_proj.weight" for prefix in prefixes for matrix in MATRICES]
        scales = {name: [f"{name}{SCALE_SUFFIX}"] if checkpoint.is_fp8(name) else [] for name in names}
        checkpoint.read_ahead(each for name in names for each in (name, *scales[name]))
        try:
            for place, prefix in zip(places, prefixes):
                layers[place.row].pool.fill_buffer(place.buffer, *read_swiglu(checkpoint, prefix))
        finally:
            checkpoint.close()

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def read_swiglu(checkpoint: TensorSource, prefix: str) -> tuple[Weight, Weight, Weight]:
    """gate, up and down of an expert or of a dense MLP."""
    gate, up, down = (checkpoint.read_weight(f"{prefix}{matrix}_proj.weight") for matrix in MATRICES)
    return gate, up, down
