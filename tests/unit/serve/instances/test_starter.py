"""How a further instance is started, and what becomes of one that does not come."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from eprt.config import EngineConfig
from eprt.serve.errors import ApiError
from eprt.serve.instances import starter as module
from eprt.serve.instances.starter import InstanceStarter, PendingStart
from eprt.serve.ranks.join_door import JoinAnswer, JoinRequest, door_name, receive_line, send_line

PORT = 2_000_000 + os.getpid()  # of no server: only a part of the door's name


def make(command: str | None = None, attention_tp: int = 1) -> InstanceStarter:
    engine = EngineConfig("model", attention_tp=attention_tp)
    options: Any = SimpleNamespace(start_instance_command=command, prefill_ranks=2, decode_ranks=1, engine=engine)
    return InstanceStarter(options, "http://127.0.0.1:1", PORT)


def start(starter: InstanceStarter, *given) -> PendingStart:
    return asyncio.run(starter.start(*given))


def launcher(answer: JoinAnswer) -> tuple[threading.Thread, list[JoinRequest]]:
    """Answers once."""
    door, asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), []
    door.bind(door_name(PORT))
    door.listen()

    def reply() -> None:
        with door, door.accept()[0] as sock:
            asked.append(receive_line(sock, JoinRequest)[0])
            send_line(sock, answer)

    thread = threading.Thread(target=reply)
    thread.start()
    return thread, asked


def test_the_launcher_is_asked_and_says_the_name():
    thread, asked = launcher(JoinAnswer(started="prefill-1", pids=[os.getpid()]))
    starter = make()
    assert str(start(starter, "prefill")) == "prefill-1"
    thread.join()
    assert (asked[0].role, asked[0].num_ranks, asked[0].by_launcher) == ("prefill", 2, True)
    starter.on_hello("decode-7", "decode", ())
    assert starter.drop_failed() == [] and starter.num_pending("prefill") == 1
    starter.on_hello("prefill-1", "prefill", ())
    assert starter.pending == []


def test_ranks_that_make_no_teams_are_refused_before_any_starts():
    with pytest.raises(ApiError, match=r"ranks=3: --attention-tp 2: 3 ranks make no teams of 2") as caught:
        start(make(attention_tp=2), "prefill", 3)
    assert (caught.value.status, caught.value.param) == (400, "ranks")


def test_a_launcher_that_refuses_or_is_not_there_is_named():
    thread, _ = launcher(JoinAnswer(error="this server has no room"))
    with pytest.raises(ApiError, match="no decode instance was started: this server has no room") as caught:
        start(make(), "decode")
    thread.join()
    assert (caught.value.status, caught.value.code) == (500, "start_failed")
    with pytest.raises(ApiError, match=r"the server's launcher does not answer \(.*\); start one with `eprt join"):
        start(make(), "decode")


def test_an_instance_whose_processes_have_ended_is_given_up(caplog):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    starter = make()
    starter.pending = [PendingStart("prefill", 1, "prefill-1", (gone.pid,)), PendingStart("decode", 1)]
    assert [str(one) for one in starter.drop_failed()] == ["prefill-1"]
    assert "prefill-1 does not come: its processes have ended" in caplog.text
    starter.pending[0].since_s = time.monotonic() - 601
    assert len(starter.drop_failed()) == 1 and "nothing has come for 600 s" in caplog.text


def test_a_command_gets_role_ranks_and_address(tmp_path):
    program = "import sys; open(sys.argv[1], 'w').write(' '.join(sys.argv[2:]))"
    starter = make(f"{sys.executable} -c \"{program}\" {tmp_path}/out {{role}} {{ranks}} 'at {{url}}'")
    assert not start(starter, "prefill", 3).name
    assert (tmp_path / "out").read_text() == "prefill 3 at http://127.0.0.1:1"
    starter.on_hello("decode-1", "decode", ())
    starter.on_hello("prefill-0", "prefill", ("prefill-0",))
    assert starter.num_pending("prefill") == 1, "that one came back by itself"
    starter.on_hello("prefill-1", "prefill", ("prefill-0",))
    assert starter.pending == []


def test_a_command_that_fails_says_why():
    code = "import sys; sys.exit('no unit of this name')"
    with pytest.raises(ApiError, match="status 1: no unit of this name"):
        start(make(f'{sys.executable} -c "{code}" {{role}}'), "prefill")
    with pytest.raises(ApiError, match="/nowhere/start: No such file or directory"):
        start(make("/nowhere/start {role}"), "prefill")
    with pytest.raises(ApiError, match=r"ranks=3: --start-instance-command has no \{ranks\}"):
        start(make("true {role}"), "prefill", 3)


def test_a_command_that_runs_on_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(module, "_COMMAND_S", 0.05)

    async def life() -> None:
        starter = make(f'{sys.executable} -c "import sys; sys.stdin.read(); input()" {{role}}')
        monkeypatch.setattr(module, "_last_line", lambda process: asyncio.sleep(1e3))
        started = await starter.start("prefill")
        assert started.process is not None
        assert await started.process.wait() == 1
        assert starter.drop_failed() == [started]
        for reading in starter._reading:
            reading.cancel()

    asyncio.run(life())
    assert "does not come: the command ended with status 1" in caplog.text
