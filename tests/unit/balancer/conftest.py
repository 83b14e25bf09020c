"""A server that a test plays."""

import pytest

from tests.unit.balancer.played_server import PlayedServer


@pytest.fixture
def played():
    server = PlayedServer()
    yield server
    server.close()
