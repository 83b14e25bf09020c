"""LayerCache: the paged memory of one attention layer. Tokens have the same slots in each of its tensors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerCache:
    latents: Tensor  # [pages, page_size, width]: entries as KVFormat says
    # [pages, page_size, width]: entries as IndexFormat says; None where the attention has no indexer
    index_keys: Tensor | None = None
    own_padding: int | None = None  # the page for padding, where others' pages follow it; None: the last one

    @property
    def num_pages(self) -> int:
        return self.latents.shape[0]

    @property
    def padding_page(self) -> int:
        """No request's."""
        return self.num_pages - 1 if self.own_padding is None else self.own_padding

    @property
    def page_size(self) -> int:
        """Tokens."""
        return self.latents.shape[1]

    @property
    def is_cuda(self) -> bool:
        return self.latents.is_cuda
