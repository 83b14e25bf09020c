"""What the documentation names exists, and what exists is documented: flags, paths, metrics, error codes, fields."""

import argparse
import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from eprt import cli
from eprt.serve.http.other_apis import OTHER_APIS

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*(ROOT / name for name in TOP), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"))
}
EVERYTHING = "\n".join(PAGES.values())
OPERATIONS = PAGES["docs/operations.md"]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
COMMANDS = (
    "serve",
    "join",
    "chat",
    "generate",
    "convert",
    "hash-load",
    "balance plan",
    "balance replay",
    "balance compare",
    "balance show",
    "balance record",
    "balancer",
    "plan-cluster",
    "diagnose",
    "bench",
    "bench serve",
    "bench layer",
    "env",
)


class _SeenError(Exception):
    pass


@cache
def options(command: str) -> dict[str, argparse.Action]:
    """Every flag of an eprt command, as its own parser knows it."""
    if command == "bench layer" and importlib.util.find_spec("torch") is None:
        return {}
    word, *rest = command.split()
    seen: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_args, **_kwargs):
        seen.append(parser)
        raise _SeenError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(_SeenError):
            cli.main([word, *rest, *(["--model", "x"] if word == "serve" else [])])
    (parser,) = seen
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[rest[0]]
    return {flag: action for action in parser._actions for flag in action.option_strings}


def command_lines() -> Iterator[tuple[str, str, list[str]]]:
    """(page, eprt command, its words) of every line of a shell block, and of every `eprt ...` in the text."""
    for page, text in PAGES.items():
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        for line in [*lines, *re.findall(r"`((?:eprt|python -m eprt|make serve)[^`]*)`", text.replace("\n", " "))]:
            words = shlex.split(line, comments=True)
            made = [shlex.split(word.partition("=")[2]) for word in words if word.startswith("ARGS=")]
            if words[:2] == ["make", "serve"]:
                yield page, "serve", [word for arguments in made for word in arguments]
            elif "eprt.serve" in words:
                yield page, "serve", words[words.index("eprt.serve") + 1 :]
            elif "eprt" in words[:4]:
                words = words[words.index("eprt") + 1 :]
                both = " ".join(words[:2])
                if both in COMMANDS or (words[:1] and words[0] in COMMANDS):
                    command = both if both in COMMANDS else words[0]
                    yield page, command, words[len(command.split()) :]


def linked_files(page: str) -> set[str]:
    """Files of the repository that a page links to, as paths from its root."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", PAGES[page])
    paths = {(ROOT / page).parent.joinpath(target).resolve() for target in targets if "://" not in target}
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_every_page_can_be_reached_from_the_index_and_no_link_is_dead():
    reached, waiting = set(), {"docs/index.md"}
    while waiting:
        page = waiting.pop()
        reached.add(page)
        waiting |= {target for target in linked_files(page) if target in PAGES} - reached
    assert reached == set(PAGES)
    dead = [f"{page}: {target}" for page in PAGES for target in linked_files(page) if not (ROOT / target).exists()]
    assert not dead, dead


ROOMS = "eprt|balancer|diagnostics|csrc|tests|benchmarks|examples|docs"
# DeepEP's own tests; a folder that the reader makes.
ELSEWHERE = {"tests/test_intranode.py", "tests/test_low_latency.py", "csrc/cuda/cubins"}


def test_files_and_modules_that_the_text_names_exist():
    """NAME and ROOM stand for names that the reader fills in. The changelog also names what is gone."""
    wrong = []
    for page, text in ((page, text) for page, text in PAGES.items() if page != "CHANGELOG.md"):
        paths = re.findall(rf"`((?:{ROOMS})/[\w./-]*\w)/?`", text)
        modules = re.findall(rf"\bpython -m\s+((?:{ROOMS})\.[\w.]*\w)", text)
        named = [*paths, *(module.replace("eprt.balancer", "balancer").replace(".", "/") for module in modules)]
        for one in named:
            there = any((ROOT / f"{one}{suffix}").exists() for suffix in ("", ".py"))
            if not there and one not in ELSEWHERE and "NAME" not in one and "ROOM" not in one:
                wrong.append(f"{page}: {one}")
    assert not wrong, wrong


def test_documented_command_lines_use_flags_that_exist():
    wrong, num_flags = [], 0
    for page, command, words in command_lines():
        for flag in (word.partition("=")[0] for word in words if FLAG.match(word)):
            num_flags += 1
            if options(command) and flag not in options(command):
                wrong.append(f"{page}: eprt {command} has no {flag}")
    assert not wrong, wrong
    assert num_flags > 80  # they were found at all


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_documented(command):
    told = set(FLAG.findall(EVERYTHING))
    silent = [flag for flag in options(command) if flag.startswith("--") and flag not in told | {"--help"}]
    assert not silent, f"no page of docs/ names {', '.join(silent)} of eprt {command}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_says_what_it_is_and_what_it_is_by_default(command):
    for flag, action in options(command).items():
        text = action.help or ""
        assert text.strip(), f"eprt {command} {flag} has no help"
        takes_a_value = action.nargs != 0 and not action.required
        if takes_a_value and action.default not in (None, [], argparse.SUPPRESS):
            assert "default" in text, f"eprt {command} {flag}: the help does not tell the default, {action.default!r}"


def test_every_path_of_the_server_is_documented_and_the_other_way_round():
    sources = "\n".join(path.read_text() for path in (ROOT / "eprt/serve/http").glob("*.py"))
    served = set(re.findall(r'Route\("([^"]+)"', sources))
    served = {re.sub(r"\{(\w+):\w+\}", lambda m: "" if m[1] == "path" else m[1].upper(), path) for path in served}
    served = {path for path in served if (path + "/") not in served}  # the page's redirect
    table = OPERATIONS.partition("| path | |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(/[^`]*)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))) == served
    known = served | {"/v1"} | set(OTHER_APIS)
    for page, text in PAGES.items():
        for path in re.findall(r"(?<![\w.{])/(?:v1|health|metrics)(?:/[a-z_]+)*/?(?![\w*])", text):
            assert path in known or path + "/" in known, f"{page}: {path}"


def test_every_metric_is_documented_and_the_other_way_round():
    sources = "\n".join(path.read_text() for path in (ROOT / "eprt/serve").rglob("*metrics.py"))
    exposed = set(re.findall(r'"(eprt_[a-z0-9_]+)"', sources))
    exposed |= {f"eprt_{name}_seconds" for name in re.findall(r'histogram\("(\w+)"', sources)}
    told = {name.removesuffix("_total") for name in re.findall(r"\beprt_[a-z0-9_]+", EVERYTHING)}
    assert told == exposed
    in_operations = {name.removesuffix("_total") for name in re.findall(r"\beprt_[a-z0-9_]+", OPERATIONS)}
    assert in_operations == exposed, "docs/operations.md lists all of them"
    counters = set(re.findall(r'Counter(?:MetricFamily)?\(\s*"(eprt_[a-z_]+)"', sources))
    for name in counters:
        assert f"{name}_total" in OPERATIONS, f"{name} is a counter: Prometheus knows it as {name}_total"


def test_every_metric_under_vllms_names_is_documented_and_the_other_way_round():
    source = (ROOT / "eprt/serve/ranks/vllm_metrics.py").read_text()
    names = {name.removesuffix("_total") for name in re.findall(r'"(vllm:[a-z0-9_]+)"', source)}
    told = {name.removesuffix("_total") for name in re.findall(r"`(vllm:[a-z0-9_]+)[`{]", PAGES["docs/monitoring.md"])}
    assert told == names


def test_every_alert_says_what_to_do():
    rules = (ROOT / "examples/deploy/prometheus/alerts.yml").read_text()
    table = PAGES["docs/monitoring.md"].partition("## Alerts")[2].partition("\n## ")[0]
    assert set(re.findall(r"alert: (\w+)", rules)) == set(re.findall(r"\b(Eprt\w+)", table))


def test_every_error_code_is_documented_and_the_other_way_round():
    files = [*(ROOT / "eprt/serve").rglob("*.py"), ROOT / "diagnostics/page/page.py"]
    sources = "\n".join(path.read_text() for path in files)
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", PAGES["docs/errors.md"], re.MULTILINE)
    told = {code for _, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    raised = set(re.findall(r'\bcode(?:: str)? ?= ?"(\w+)"', sources)) | set(
        re.findall(r'_refuse\(\d+, "(\w+)"', sources)
    )
    states = {"loading", "draining", "stopping", "lost"}  # a server's, as codes of what it then refuses
    assert all(f'"{state}"' in sources for state in states)
    assert told == raised | states


def test_every_field_of_what_the_rebalancer_tells_is_documented():
    from eprt.balancer.daemon import Status
    from eprt.balancer.trigger import Decision

    from eprt.serve.rebalance.migration import Migration

    section = PAGES["docs/files.md"].partition("## Rebalancer")[2].partition("\n## ")[0]
    told = set(re.findall(r"`(\w+)`", section))
    for kind in (Status, Decision, Migration):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert fields <= told, f"docs/files.md does not name {kind.__name__}'s {fields - told}"
    source = (ROOT / "eprt/serve/rebalance/rebalancer.py").read_text()
    for name in ("load_document", "_work_counters", "status"):
        method = re.search(rf"    def {name}\(.*?(?=\n    (?:@|def |async def |# --))", source, re.DOTALL)
        assert method is not None
        keys = set(re.findall(r'^\s+"(\w+)": ', method[0], re.MULTILINE))
        assert keys and keys - {"schema"} <= told, f"docs/files.md does not name {name}'s {keys - told}"
