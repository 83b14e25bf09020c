"""Open-loop load on a running server, and what its users would feel: `eprt bench serve`.

    eprt bench serve --url http://127.0.0.1:8000 --rate 2 4 8 --seconds 30 --input-tokens 256 --output-tokens 64

Requests arrive at random (Poisson) at the wanted rate whether or not earlier ones have been answered, so that a server
that falls behind shows it. Times count from the moment a request was due, so that a late client hides nothing.

    ttft      time to first token
    itl       time between two tokens of one request
    goodput   requests per second that met both limits of a tier: ttft, and the request's mean itl

With --tier NAME=S,S each rate has, for each tier: NAME_share of its requests that met both limits, NAME_goodput,
NAME_tokens_s (generated tokens of those, per second), NAME_refused (429, code tier_busy). --mix NAME=WEIGHT lets
requests ask for a service_tier, drawn by these weights: then a tier's figures are of those that asked for it, else of
all. --plot FILE draws the rates; result files given by name are drawn and nothing is sent.

Exit status 0; 1 when a request failed (the table says how many); 2 when the server cannot be used.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.serving.serve_picture import draw, read_results
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import quantile
from eprt import env
from eprt.serve.tiers.tier import Tier, parse_tiers

NUM_RANKS = 0
NAME = "serve"
ON_REQUEST = "needs a running server; flags without --"

_LOADING_S = 600.0  # a large model from a slow disk
# Service levels: seconds to the first token, seconds between tokens.
TIERS = ((2.0, 0.070), (1.5, 0.050), (1.0, 0.030))
_MOST = 10**6  # requests a second, seconds, requests, tokens
_FIRST_ID = 3  # below lie the special tokens of most tokenizers


@dataclass(frozen=True)
class OpenLoopLoad:
    """The requests of one run."""

    rate: float  # requests per second
    seconds: float  # how long they arrive
    input_tokens: int  # of a prompt; lengths are uniform within `spread` of these two
    output_tokens: int  # of an answer
    spread: float  # fraction, 0 to 1
    max_token_id: int
    seed: int
    mix: tuple[tuple[str, float], ...] = ()  # service tiers that requests ask for, with weights; empty: for none

    def requests(self) -> list[tuple[float, dict[str, Any]]]:
        """(seconds after the start, body) of each request."""
        rng = np.random.default_rng(self.seed)
        gaps = rng.exponential(1 / self.rate, size=max(1, round(self.rate * self.seconds)))
        bodies = []
        for at in np.cumsum(gaps).tolist():
            num_in, num_out = self._length(rng, self.input_tokens), self._length(rng, self.output_tokens)
            body = {
                "prompt": rng.integers(_FIRST_ID, self.max_token_id + 1, num_in).tolist(),
                "max_tokens": num_out,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            if self.mix:
                names, weights = zip(*self.mix)
                body["service_tier"] = names[int(rng.choice(len(names), p=np.array(weights) / sum(weights)))]
            bodies.append((at, body))
        return bodies

    def _length(self, rng: np.random.Generator, wanted: int) -> int:
        low, high = round(wanted * (1 - self.spread)), round(wanted * (1 + self.spread))
        return max(1, int(rng.integers(low, high + 1)))


@dataclass
class ServedRequest:
    """What came of one request."""

    wanted: int  # tokens
    token_s: list[float] = field(default_factory=list)  # when each token came, seconds since the request was due
    error: str | None = None  # why no more tokens came
    refused: bool = False  # the server said that it would be too late
    tier: str | None = None  # that it asked for

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def itl_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_s, self.token_s[1:])]

    def meets(self, ttft_s: float, itl_s: float) -> bool:
        mean_s = (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)
        return self.ttft_s <= ttft_s and mean_s <= itl_s


async def drive(
    url: str, model: str, load: OpenLoopLoad, api_key: str | None = None
) -> tuple[list[ServedRequest], float]:
    """Sends the load; returns what came of each request, and the seconds until the last answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, headers=headers) as client:
        start = time.perf_counter()
        tasks = []
        for at, body in load.requests():
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            tasks.append(asyncio.create_task(_send(client, {**body, "model": model}, start + at)))
        served = await asyncio.gather(*tasks)
        return served, time.perf_counter() - start


async def _send(client: httpx.AsyncClient, body: dict[str, Any], due: float) -> ServedRequest:
    served = ServedRequest(body["max_tokens"], tier=body.get("service_tier"))
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                content = (await response.aread()).decode(errors="replace")
                served.error = f"{response.status_code}: {content[:200]}"
                served.refused = response.status_code == 429 and '"tier_busy"' in content
                return served
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _add_tokens(served, json.loads(line[6:]), time.perf_counter() - due)
    except httpx.HTTPError as error:
        served.error = f"{type(error).__name__}: {error}"
    if served.error is None and len(served.token_s) != served.wanted:
        served.error = f"{len(served.token_s)} tokens came of {served.wanted}"
    return served


def _add_tokens(served: ServedRequest, event: dict[str, Any], now_s: float) -> None:
    if "error" in event:
        served.error = str(event["error"].get("message"))
    for choice in event.get("choices", ()):
        served.token_s += [now_s] * len(choice.get("token_ids") or ())


def summary(
    load: OpenLoopLoad, served: list[ServedRequest], took_s: float, tiers: Sequence[Tier] = ()
) -> dict[str, Any]:
    """One row of the table."""
    good = [s for s in served if s.error is None]
    ttft_s, itl_s = sorted(s.ttft_s for s in good), sorted(gap for s in good for gap in s.itl_s)
    num_refused = sum(s.refused for s in served)
    row: dict[str, Any] = {"rate": load.rate, "requests": len(served), "failed": len(served) - len(good) - num_refused}
    row["tokens_s"] = sum(len(s.token_s) for s in good) / took_s
    for name, values in (("ttft", ttft_s), ("itl", itl_s)):
        for percent in (50, 95, 99):
            row[f"{name}_p{percent}_ms"] = quantile(values, percent / 100) * 1e3 if values else float("nan")
    for ttft, itl in TIERS if not tiers else ():
        row[f"goodput_{ttft:g}s_{itl * 1e3:g}ms"] = sum(s.meets(ttft, itl) for s in good) / took_s
    for tier in tiers:
        of_tier = [s for s in served if not load.mix or s.tier == tier.name]
        met = [s for s in of_tier if s.error is None and s.meets(tier.ttft_s, tier.itl_s)]
        row[f"{tier.name}_share"] = len(met) / len(of_tier) if of_tier else float("nan")
        row[f"{tier.name}_goodput"] = len(met) / took_s
        row[f"{tier.name}_tokens_s"] = sum(len(s.token_s) for s in met) / took_s
        row[f"{tier.name}_refused"] = sum(s.refused for s in of_tier)
    return row


def find_model(url: str, api_key: str | None) -> str:
    """The name of the server's model. Raises ValueError when there is no such server."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/v1/models", timeout=10, headers=headers)
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--url {url}: no OpenAI-compatible server answers there ({error})") from None


def wait_until_loaded(url: str, timeout_s: float = _LOADING_S) -> None:
    """Of a server whose /health says that its model is loading; any other is taken as it is."""
    deadline_s = time.monotonic() + timeout_s
    while (answer := httpx.get(f"{url}/health", timeout=10)).status_code == 503 and '"loading"' in answer.text:
        if time.monotonic() > deadline_s:
            raise ValueError(f"--url {url}: the model was still loading after {timeout_s:g} s")
        time.sleep(0.2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eprt bench serve", description="Open-loop load on a running server: latency and goodput at each rate."
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    add("--model", help="default: the server's first")
    add("--api-key", metavar="KEY", help="the server's; default: EPRT_API_KEY")
    text = "result files of earlier runs: they are drawn by --plot, and nothing is sent"
    add("files", nargs="*", type=Path, metavar="RESULT.json", help=text)
    text = "draw times and goodput against the rate, this run's or those of the files: as load.png or load.svg"
    add("--plot", type=Path, metavar="FILE", help=text)
    text = "what the run is called in the picture, and in the name of its file: serve_load_TEXT.json"
    add("--label", metavar="TEXT", help=text)
    text = "limits to judge by, as eprt serve has them: max=1.0,0.030; may be repeated; default: three, without names"
    add("--tier", dest="tiers", action="append", default=[], metavar="NAME=S,S", help=text)
    text = "service tiers that requests ask for, with weights, as max=1 base=3; default: they ask for none"
    add("--mix", nargs="+", default=[], metavar="NAME=WEIGHT", help=text)
    text = "where serve_load.json is written, default: here"
    add("--out", type=Path, default=Path(), metavar="DIR", help=text)
    add(
        "--rate",
        type=float,
        nargs="+",
        default=[1.0, 2.0, 4.0],
        metavar="R",
        help="requests per second, several in turn; default 1 2 4",
    )
    add(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="how long requests arrive at each rate, default %(default)s",
    )
    add(
        "--input-tokens",
        type=int,
        default=256,
        metavar="N",
        help="of a prompt of random token ids, default %(default)s",
    )
    add("--output-tokens", type=int, default=64, metavar="N", help="of an answer, default %(default)s")
    add(
        "--spread",
        type=float,
        default=0.5,
        metavar="X",
        help="lengths vary by this fraction either way, default %(default)s",
    )
    add("--max-token-id", type=int, default=500, metavar="N", help="largest token id in prompts, default %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and prompts, default %(default)s")
    return parser


def _loads(arguments: argparse.Namespace) -> list[OpenLoopLoad]:
    for flag, ok, want in (
        ("--rate", all(0 < rate <= _MOST for rate in arguments.rate), f"above 0 and at most {_MOST}"),
        ("--seconds", 0 < arguments.seconds <= _MOST, f"above 0 and at most {_MOST}"),
        ("--input-tokens", 1 <= arguments.input_tokens <= _MOST, f"from 1 to {_MOST}"),
        ("--output-tokens", 1 <= arguments.output_tokens <= _MOST, f"from 1 to {_MOST}"),
        ("--spread", 0 <= arguments.spread <= 1, "in 0..1"),
        ("--max-token-id", _FIRST_ID <= arguments.max_token_id < 2**31, f"at least {_FIRST_ID} and below 2^31"),
        ("--seed", arguments.seed >= 0, "at least 0"),
    ):
        if not ok:
            raise ValueError(f"{flag} {getattr(arguments, flag[2:].replace('-', '_'))}: must be {want}")
    if (most := max(arguments.rate) * arguments.seconds) > _MOST:
        raise ValueError(f"--rate {max(arguments.rate):g}, --seconds: {most:g} requests are more than {_MOST}")
    lengths = (arguments.input_tokens, arguments.output_tokens, arguments.spread)
    more = (arguments.max_token_id, arguments.seed, _mix(arguments.mix, arguments.tiers))
    return [OpenLoopLoad(r, arguments.seconds, *lengths, *more) for r in arguments.rate]


def _mix(given: Sequence[str], tiers: Sequence[Tier]) -> tuple[tuple[str, float], ...]:
    mix: dict[str, float] = {}
    for text in given:
        name, _, weight = text.partition("=")
        try:
            mix[name] = float(weight)
        except ValueError:
            raise ValueError(f"--mix {text}: must be NAME=WEIGHT, as max=1") from None
        if not 0 < mix[name] < float("inf"):
            raise ValueError(f"--mix {text}: the weight must be above 0")
        if name not in [tier.name for tier in tiers]:
            raise ValueError(f"--mix {text}: say its limits, too, with --tier {name}=SECONDS,SECONDS")
    return tuple(mix.items())


def _check_names(arguments: argparse.Namespace) -> None:
    """Flags about files, before anything is sent."""
    try:
        arguments.tiers = parse_tiers(arguments.tiers)
    except ValueError as error:
        raise ValueError(f"--tier {error}") from None
    if arguments.files and arguments.plot is None:
        raise ValueError(f"{arguments.files[0]}: result files are drawn; say where with --plot FILE")
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise ValueError(f"--plot {arguments.plot}: matplotlib is not installed; `pip install matplotlib`")
    if arguments.plot is not None and arguments.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {arguments.plot}: the name must end in .png, .svg or .pdf")
    if arguments.plot is not None and (arguments.plot.is_dir() or not arguments.plot.parent.is_dir()):
        raise ValueError(f"--plot {arguments.plot}: must name a file in a directory that is there")
    if arguments.label is not None and not re.fullmatch(r"[\w.-]+", arguments.label):
        raise ValueError(f"--label {arguments.label}: must be letters, digits and . _ -: it is part of a file's name")
    if not arguments.files:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {arguments.out}: {error.strerror or error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    url = arguments.url.rstrip("/")
    try:
        arguments.api_key = arguments.api_key or env.get("EPRT_API_KEY")
        _check_names(arguments)
        if arguments.files:
            print(f"written to {draw(read_results(arguments.files), arguments.plot)}")
            return 0
        loads = _loads(arguments)
        model = arguments.model or find_model(url, arguments.api_key)
        wait_until_loaded(url)
    except (ValueError, httpx.HTTPError) as error:
        print(f"eprt bench serve: {error}", file=sys.stderr)
        return 2
    config = {"model": model, "input_tokens": arguments.input_tokens, "output_tokens": arguments.output_tokens}
    config |= {"spread": arguments.spread, "seconds": arguments.seconds}
    if arguments.tiers:
        config["tiers"] = {tier.name: f"{tier.ttft_s:g} s, {tier.itl_s * 1e3:g} ms" for tier in arguments.tiers}
        config["mix"] = dict(loads[0].mix)
    name = "serve_load"
    if arguments.label:
        name, config["label"] = f"{name}_{arguments.label}", arguments.label
    report = BenchmarkReport(name, config)
    reasons: dict[str, int] = {}
    for load in loads:
        served, took_s = asyncio.run(drive(url, model, load, arguments.api_key))
        report.add_row(**summary(load, served, took_s, arguments.tiers))
        for one in served:
            if one.error is not None and not one.refused:
                reasons[one.error] = reasons.get(one.error, 0) + 1
    try:
        written = report.finish(arguments.out)
    except OSError as error:
        print(
            f"eprt bench serve: --out {arguments.out}: {error.strerror or error}: nothing was written", file=sys.stderr
        )
        return 2
    print(f"written to {written}")
    if arguments.plot is not None:
        print(f"written to {draw(read_results([written]), arguments.plot)}")
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:5]:
        print(f"{count} failed: {reason}", file=sys.stderr)
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
