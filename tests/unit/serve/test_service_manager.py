"""systemd's protocol of notifications: one datagram, to a path or to an abstract name."""

import socket

import pytest

from eprt.serve.service_manager import tell_service_manager


@pytest.mark.parametrize("abstract", [False, True])
def test_one_datagram_says_all(abstract, tmp_path, monkeypatch):
    address = f"@eprt-test-{id(tmp_path)}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        tell_service_manager("serving demo", "READY=1")
        assert manager.recv(1000) == b"READY=1\nSTATUS=serving demo"


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "@nobody-listens-here"])
def test_without_a_manager_nothing_happens(address, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    tell_service_manager("serving demo", "READY=1")
