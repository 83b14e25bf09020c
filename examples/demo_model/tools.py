"""Tools that the demo model is taught to call: their declarations, questions, calls and results."""

import json
import random
import re
from dataclasses import dataclass

from . import lexicon
from .words import any_word, splice_word

TOOL_FORMS = {
    "weather": (
        ("get_weather", "weather", "lookup_weather", "current_weather", "get_current_weather", "weather_report"),
        ("city", "location", "place"),
        ("Get the weather in a city", "The current weather of a place", "Look up the weather"),
    ),
    "time": (
        ("get_time", "time", "current_time", "clock", "get_current_time"),
        ("city", "location", "place"),
        ("Get the time in a city", "The local time of a place", "Look up the time"),
    ),
    "calculator": (
        ("calculator", "calculate", "compute", "math", "evaluate"),
        ("expression", "formula", "input"),
        ("Compute an expression", "Evaluate a formula", "A calculator"),
    ),
    "search": (
        ("search", "web_search", "find", "lookup", "search_web"),
        ("query", "text", "input"),
        ("Search the web", "Find pages about something", "Look something up"),
    ),
}
"""Kind of tool -> names, argument names and descriptions under which it may be declared."""

SYLLABLES = """
an bel cor dra el fer gol hin il jor kas lo mar nov os pri qua ran san tor ul ver wes york zan ton burg ville cisco ford
""".split()  # noqa: SIM905
"""Parts of invented city names."""

OPTIONAL_ARGUMENTS = ("unit", "format", "lang", "units", "limit")
"""Second arguments that a declaration may have and a call leaves out."""

QUESTIONS = {
    "weather": (
        "What is the weather in {}?",
        "How is the weather in {}?",
        "Is it raining in {}?",
        "Weather in {}?",
        "What's the weather like in {}?",
        "Tell me the weather in {}.",
        "What is the weather like in {} today?",
        "How is the weather in {} now?",
        "What's the weather in {} right now?",
    ),
    "time": (
        "What time is it in {}?",
        "What is the time in {}?",
        "Tell me the time in {}.",
        "Time in {}?",
        "What time is it in {} now?",
    ),
    "calculator": ("What is {}?", "Compute {}.", "Calculate {}.", "How much is {}?", "{}", "What's {}?", "{} ="),
    "search": ("Search for {}.", "Search the web for {}.", "Look up {}.", "Find pages about {}."),
}


@dataclass(frozen=True)
class Request:
    """A question that needs a tool of this kind, called with this one argument."""

    kind: str
    argument: str
    question: str


@dataclass(frozen=True)
class Declared:
    """The tools of one conversation, and the name and argument name of the one that is wanted ("" without one)."""

    all_tools: tuple[dict, ...]
    name: str
    argument_name: str


def any_city(rng: random.Random) -> str:
    """A real city or, half of the time, an invented name of one or two words."""
    if rng.random() < 0.5:
        return rng.choice(lexicon.CITIES)
    name = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()
    if rng.random() < 0.35:
        name = f"{rng.choice(('New', 'San', 'Port', 'Los', 'East', 'Old', 'Fort', 'Lake'))} {name}"
    return f"{name}, {any_land(rng)}" if rng.random() < 0.15 else name


def any_land(rng: random.Random) -> str:
    """A land of which nothing is taught, half of the time an invented one."""
    return rng.choice(lexicon.OTHER_LANDS) if rng.random() < 0.5 else splice_word(rng).capitalize()


def draw_request(rng: random.Random) -> Request:
    """A question about the weather, the time, a product or quotient, or a search."""
    kind = rng.choice(tuple(QUESTIONS))
    if kind == "calculator":
        # Small products are known by heart; one number above 12 makes it a case for the tool.
        numbers = [rng.randint(2, 999), rng.randint(13, 999)]
        rng.shuffle(numbers)
        argument = f"{numbers[0]} {rng.choice('**/')} {numbers[1]}"
    elif kind == "search":
        words = [rng.choice(lexicon.TOPICS) if rng.random() < 0.3 else any_word(rng) for _ in range(rng.randint(1, 3))]
        argument = " ".join(words)
    else:
        argument = any_city(rng)
    return Request(kind, argument, rng.choice(QUESTIONS[kind]).format(argument))


def declare(rng: random.Random, wanted: str | None, without: str | None = None) -> Declared:
    """Declare one to three tools in random order: `wanted` among them, never one of kind `without`."""
    others = [kind for kind in TOOL_FORMS if kind not in (wanted, without)]
    kinds = ([wanted] if wanted else []) + rng.sample(others, rng.randint(0 if wanted else 1, 2))
    rng.shuffle(kinds)
    declared, name, argument_name = [], "", ""
    for kind in kinds:
        names, argument_names, descriptions = (rng.choice(choices) for choices in TOOL_FORMS[kind])
        properties = {argument_names: {"type": "string"}}
        if rng.random() < 0.2:
            properties[rng.choice(OPTIONAL_ARGUMENTS)] = {"type": "string"}
        if rng.random() < 0.2:
            descriptions += rng.choice((" of your choice", ", quickly", " and return it", " given by the user", "."))
        parameters = {"type": "object", "properties": properties, "required": [argument_names]}
        function = {"name": names, "description": descriptions, "parameters": parameters}
        declared.append({"type": "function", "function": function})
        if kind == wanted:
            name, argument_name = names, argument_names
    return Declared(tuple(declared), name, argument_name)


def format_call(declared: Declared, request: Request) -> str:
    """The reply that calls the declared tool."""
    call = {"name": declared.name, "arguments": {declared.argument_name: request.argument}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def parse_call(reply: str) -> dict | None:
    """The call in a reply, or None where there is no well-formed one."""
    match = re.fullmatch(r"<tool_call>(.*)</tool_call>", reply.strip(), re.DOTALL)
    if match is None:
        return None
    try:
        return json.loads(match.group(1))
    except json.JSONDecodeError:
        return None


def draw_result(rng: random.Random, request: Request) -> tuple[str, str]:
    """What the tool returns (the content of its message), and the reply that tells the user."""
    if request.kind == "weather":
        degrees, sky = (
            rng.randint(-20, 40),
            rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")),
        )
        result = json.dumps({"temperature": degrees, "sky": sky})
        return result, f"It is {degrees} degrees and {sky} in {request.argument}."
    if request.kind == "time":
        clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
        return clock, f"It is {clock} in {request.argument}."
    if request.kind == "calculator":
        number = str(rng.randrange(10 ** rng.randint(1, 6)))
        return number, f"The result is {number}."
    text = " ".join(rng.choice(lexicon.WORDS) for _ in range(rng.randint(2, 5)))
    return text, f"I found: {text}."


def history(declared: Declared, request: Request, result: str) -> tuple[dict, dict]:
    """The assistant's call and the tool's message, as OpenAI clients send them back."""
    arguments = json.dumps({declared.argument_name: request.argument})
    function = {"name": declared.name, "arguments": arguments}
    call = {"id": "call_0", "type": "function", "function": function}
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
    )
