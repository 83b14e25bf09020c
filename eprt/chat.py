"""`eprt chat URL`: a conversation with a running server, in a terminal.

Answers appear as they are generated. Ctrl-C ends an answer, and the conversation goes on; Ctrl-D ends eprt chat. Lines
that begin with / are commands. Needs the standard library alone, and knows nothing of how a server works.
"""

import argparse
import contextlib
import http.client
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eprt import env

_CONNECT_S = 10.0
_ANSWER_S = 600.0  # of silence within an answer: prompts of a busy server wait
_DIM, _PLAIN = "\033[2m", "\033[0m"
_HELP = """\
/system TEXT    what the model is told before the conversation; without TEXT: nothing
/set NAME VALUE a field of the requests, as temperature 0.7 or max_tokens 200; without VALUE: the server's default
/retry          the latest question again
/undo           forget the latest question and its answer
/clear          forget the conversation
/save FILE      write the conversation as JSON, as a request's `messages`
/load FILE      go on with such a conversation
/help           this list
/quit           end (or Ctrl-D); Ctrl-C ends an answer"""


class ChatError(Exception):
    """The server did not do as asked; str() is the line to print."""


class ChatClient:
    """One server. Args: url: as it was announced, http://host:port; key: None where it asks for none."""

    def __init__(self, url: str, key: str | None):
        shown = url if url.isprintable() else ascii(url)
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:  # brackets, a port that is none
            raise ChatError(f"{shown}: {error}: must be the address of a server, as http://127.0.0.1:8000") from None
        is_plain = url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not self._host or not is_plain:
            raise ChatError(f"{shown}: must be the address of a server, as http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        with self._ask("GET", "/v1/models", None) as reply:
            document = json.loads(reply.read())
        try:
            return document["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ChatError(f"{self.url}: names no model at /v1/models") from None

    def deltas(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The parts of an answer, as they come."""
        with self._ask("POST", "/v1/chat/completions", {**body, "stream": True}) as reply:
            for line in reply:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                yield from _deltas_of(json.loads(data), self.url)

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        """The reply, whose connection ends with the block: so does the answer on the server."""
        connection = self._make(self._host, self._port, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_S)
            connection.request(method, self._prefix + path, None if body is None else json.dumps(body), self._headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise ChatError(_told(self.url, reply.status, reply.read()))
            yield reply
        except RecursionError:
            raise ChatError(f"{self.url}: its answer is nested too deeply") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatError(
                f"{self.url}: {getattr(error, 'strerror', None) or error or type(error).__name__}"
            ) from None
        finally:
            connection.close()


def _deltas_of(event: Any, url: str) -> list[dict[str, Any]]:
    """ChatError for one that tells of an error, or is none of a chat completion."""
    try:
        if "error" in event:
            raise ChatError(event["error"].get("message", "the server says no more"))
        return [dict(choice.get("delta") or {}) for choice in event.get("choices", ())]
    except (AttributeError, TypeError, ValueError):
        raise ChatError(f"{url}: not an answer of an OpenAI-compatible server: {json.dumps(event)[:80]}") from None


def _told(url: str, status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace").strip()
    remedy = "; --api-key or EPRT_API_KEY gives the key" if status == 401 else ""
    return f"{url} answers {status}: {message}{remedy}"


@dataclass
class Conversation:
    """What was said, and how to go on."""

    model: str
    system: str = ""
    fields: dict[str, Any] = field(default_factory=dict)  # of each request
    turns: list[dict[str, str]] = field(default_factory=list)  # user and assistant, alternating

    def messages(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def body(self) -> dict[str, Any]:
        return {"model": self.model, "messages": self.messages(), **self.fields}

    def set_field(self, name: str, text: str) -> None:
        if not text:
            self.fields.pop(name, None)
            return
        try:
            self.fields[name] = json.loads(text)
        except RecursionError:
            raise ValueError(f"{name}: nested too deeply") from None
        except ValueError:
            self.fields[name] = text

    def undo(self) -> str | None:
        """Forgets the latest question, which is returned, and its answer."""
        while self.turns:
            if (turn := self.turns.pop())["role"] == "user":
                return turn["content"]
        return None

    def load(self, messages: Any) -> None:
        """ValueError where these are no messages."""
        known = isinstance(messages, list) and all(
            isinstance(each, dict) and isinstance(each.get("content"), str) and isinstance(each.get("role"), str)
            for each in messages
        )
        if not known:
            raise ValueError("must hold a list of messages, each with role and content")
        self.system = "\n".join(each["content"] for each in messages if each["role"] == "system")
        self.turns = [
            {"role": each["role"], "content": each["content"]} for each in messages if each["role"] != "system"
        ]


class ChatTerminal:
    """Reads lines, prints answers. Args: in_terminal: whether a person sees it."""

    def __init__(self, client: ChatClient, conversation: Conversation, in_terminal: bool):
        self._client, self._conversation, self._in_terminal = client, conversation, in_terminal

    def run(self) -> None:
        """Until the end of the input, or /quit."""
        while True:
            try:
                line = input("> " if self._in_terminal else "").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit ends)")
                continue
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(*line[1:].partition(" ")[::2])
            elif line:
                self._ask(line)

    def _ask(self, question: str) -> None:
        conversation = self._conversation
        conversation.turns.append({"role": "user", "content": question})
        answer = ""
        try:
            for text in self._shown(self._client.deltas(conversation.body())):
                answer += text
        except KeyboardInterrupt:
            print(self._dimmed(" (ended)"))
        except ChatError as error:
            print(f"eprt chat: {error}", file=sys.stderr, flush=True)
            if not answer:
                conversation.undo()  # the question can be asked again
                return
        else:
            print()
        conversation.turns.append({"role": "assistant", "content": answer})

    def _shown(self, deltas: Iterator[dict[str, Any]]) -> Iterator[str]:
        """Prints an answer; yields its text, without the reasoning."""
        reasons = False
        for delta in deltas:
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                print(self._dimmed(thought), end="", flush=True)
                reasons = True
            if text := delta.get("content"):
                print(("\n\n" if reasons else "") + text, end="", flush=True)
                reasons = False
                yield text
            for call in delta.get("tool_calls") or ():
                print(self._dimmed(json.dumps(call.get("function", {}))), end="", flush=True)

    def _dimmed(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self._in_terminal else text

    def _command(self, name: str, rest: str) -> None:
        conversation, rest = self._conversation, rest.strip()
        match name:
            case "system":
                conversation.system = rest
            case "set" if rest:
                try:
                    conversation.set_field(*rest.partition(" ")[::2])
                except ValueError as error:
                    print(error)
            case "clear":
                conversation.turns.clear()
            case "undo":
                conversation.undo()
            case "retry":
                if question := conversation.undo():
                    self._ask(question)
            case "save" | "load" if rest:
                self._use_file(name, Path(rest))
            case "help":
                print(_HELP)
            case _:
                print(f"no command /{name}{' without a value' if name in ('set', 'save', 'load') else ''}; /help")

    def _use_file(self, name: str, path: Path) -> None:
        try:
            path = path.expanduser()
            if name == "save":
                path.write_text(json.dumps(self._conversation.messages(), indent=1, ensure_ascii=False) + "\n")
            else:
                self._conversation.load(json.loads(path.read_text()))
        except RecursionError:
            print(f"{path}: nested too deeply")
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~NAME of nobody
            print(f"{path}: {getattr(error, 'strerror', None) or error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eprt chat",
        description="A conversation with a running server. /help lists the commands in it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the server's address, default %(default)s",
    )
    add("--model", metavar="NAME", help="model to ask, default: the server's first")
    add("--system", default="", metavar="TEXT", help="system prompt; default: none")
    text = "a field of each request, as temperature=0.7; may be repeated; default: the server's values"
    add("--set", action="append", default=[], dest="fields", metavar="NAME=VALUE", help=text)
    text = "the server's key, which `ps` shows: better in EPRT_API_KEY, the default"
    add("--api-key", metavar="KEY", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 where the server does not answer or a flag is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        client = ChatClient(arguments.url, arguments.api_key or env.get("EPRT_API_KEY"))
        conversation = Conversation(arguments.model or client.first_model(), arguments.system)
        for given in arguments.fields:
            name, equals, value = given.partition("=")
            if not (name and equals):
                raise ChatError(f"--set {given}: must be NAME=VALUE")
            conversation.set_field(name, value)
    except (ChatError, ValueError) as error:
        print(f"eprt chat: {error}", file=sys.stderr)
        return 2
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if in_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # from here on input() knows the arrow keys
        print(f"{conversation.model} at {client.url}; /help lists commands, Ctrl-D ends", flush=True)
    try:
        ChatTerminal(client, conversation, in_terminal).run()
    except UnicodeDecodeError as error:
        print(f"eprt chat: standard input is not text in {error.encoding}: {error.reason}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # a reader that has seen enough
        sys.stderr.close()
    return 0
