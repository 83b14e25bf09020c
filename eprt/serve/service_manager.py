"""What systemd is told of a server that it starts with Type=notify: that requests are served, and that they end.

Source: sd_notify(3): lines NAME=VALUE as one datagram to the socket that NOTIFY_SOCKET names. Knows nothing of ranks.
"""

import contextlib
import socket

from eprt import env


def tell_service_manager(status: str, *lines: str) -> None:
    """status: for people, in `systemctl status`. lines: READY=1, STOPPING=1. Nothing where nobody listens."""
    address = env.notify_socket()
    if address is None:
        return
    if address.startswith("@"):  # no file, but a name of the kernel's
        address = "\0" + address[1:]
    message = "\n".join((*lines, f"STATUS={status}")).encode()
    # A manager that is gone is no reason to stop serving.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(message, address)
