"""Config: how many SMs a normal-mode call may use. Knows nothing of buffers or kernels."""

from dataclasses import dataclass

from eprt import env

DEFAULT_SMS = 20


@dataclass(frozen=True)
class Config:
    """DeepEP's settings of a normal-mode call. Only num_sms has an effect."""

    num_sms: int = DEFAULT_SMS  # even
    # Sizes of DeepEP's queues. eprt writes rows directly to their place and has no queues.
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self):
        if self.num_sms < 0 or self.num_sms % 2:
            raise ValueError(f"Config.num_sms={self.num_sms}: must be even and not negative")
        for network in ("nvl", "rdma"):
            send, recv = (getattr(self, f"num_max_{network}_chunked_{way}_tokens") for way in ("send", "recv"))
            if not 0 < send < recv:
                raise ValueError(
                    f"Config: num_max_{network}_chunked_send_tokens={send} must be above 0 and below "
                    f"num_max_{network}_chunked_recv_tokens={recv}"
                )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """A num_nvl_bytes for Buffer: enough for two results of a dispatch in which all ranks send EPRT_DEEP_EP_TOKENS
        tokens to one rank, and for the rows of a combine."""
        rows = env.get("EPRT_DEEP_EP_TOKENS") * num_ranks
        return 3 * rows * (hidden_bytes + 1024)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: nothing crosses a network."""
        return 0
