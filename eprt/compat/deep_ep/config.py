"""Config: how many SMs a normal-mode call may use. DeepEP's chunk sizes are accepted and have no effect."""

from dataclasses import dataclass

from eprt import env

DEFAULT_SMS = 20


@dataclass(frozen=True)
class Config:
    """num_sms: even. The others: queue sizes of DeepEP; eprt writes rows straight to their place and has no queues."""

    num_sms: int = DEFAULT_SMS
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
        """Bytes for Buffer(num_nvl_bytes=...): two results of a dispatch of EPRT_DEEP_EP_TOKENS tokens per rank, all of
        which go to one rank, and the rows of a combine."""
        rows = env.get("EPRT_DEEP_EP_TOKENS") * num_ranks
        return 3 * rows * (hidden_bytes + 1024)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: nothing crosses a network."""
        return 0
