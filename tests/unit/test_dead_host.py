import socket

from eprt.dead_host import notice_dead_host


def test_a_silent_host_is_given_up_after_five_seconds():
    with socket.socket() as sock:
        notice_dead_host(sock)
        probes = [sock.getsockopt(socket.IPPROTO_TCP, each) for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and probes == [2, 1]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
