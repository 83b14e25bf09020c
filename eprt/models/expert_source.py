"""ExpertSource: experts of a model that serves already, from copies in host memory or from its checkpoint once more.

For a rank that is to hold other experts than at the start. Knows names of tensors, and nothing of who asks.
"""

from collections.abc import Sequence

from eprt.config import ModelConfig
from eprt.layers.moe import EPMoE
from eprt.models.checkpoint import TensorSource
from eprt.models.expert_copies import ExpertCopies
from eprt.models.families import family_of
from eprt.models.model import ExpertPlace
from eprt.ops.weight import Weight


class ExpertSource:
    """Where a rank gets experts from.

    Args:
        config: of the model.
        checkpoint: from which it was read; its files may be closed.
        copies: that are asked first; None: there are none.
    """

    def __init__(self, config: ModelConfig, checkpoint: TensorSource, copies: ExpertCopies | None = None):
        self._config, self._family = config, family_of(config)
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
        matrices = self._family.matrices
        of_layers = [self._family.mlp_prefix(self._config, layers[place.row].layer_idx) for place in places]
        prefixes = [f"{of_layer}experts.{place.expert}." for of_layer, place in zip(of_layers, places)]
        names = [f"{prefix}{matrix}.weight" for prefix in prefixes for matrix in matrices]
        scales = {name: [checkpoint.scale_name(name)] if checkpoint.is_quantised(name) else [] for name in names}
        checkpoint.read_ahead(each for name in names for each in (name, *scales[name]))
        try:
            for place, prefix in zip(places, prefixes):
                layers[place.row].pool.fill_buffer(place.buffer, *read_swiglu(checkpoint, prefix, matrices))
        finally:
            checkpoint.close()

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def read_swiglu(checkpoint: TensorSource, prefix: str, matrices: tuple[str, str, str]) -> tuple[Weight, Weight, Weight]:
    """gate, up and down of an expert or of a dense MLP."""
    gate, up, down = (checkpoint.read_weight(f"{prefix}{matrix}.weight") for matrix in matrices)
    return gate, up, down
