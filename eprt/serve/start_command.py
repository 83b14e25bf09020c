"""The operator's command that starts an instance: how it is written. Knows nothing of how it is run."""

import shlex
import string

PLACEHOLDERS = ("role", "ranks", "url")


def check_command(command: str) -> None:
    """ValueError with one line that names value and remedy."""
    want = "as 'systemctl start eprt@{role}'"
    try:
        words = shlex.split(command)
        names = {name for word in words for _, name, _, _ in string.Formatter().parse(word) if name is not None}
    except ValueError as error:
        raise ValueError(f"{command}: cannot be read ({error}); write it {want}") from None
    if not words:
        raise ValueError(f"{command!r}: is empty; give a command, {want}, or leave it out")
    if unknown := names - set(PLACEHOLDERS):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"{command}: {{{min(unknown)}}} is unknown; there are {known}")
    if "role" not in names:
        raise ValueError(f"{command}: has no {{role}}, so it could not know what to start; write it {want}")


def command_words(command: str, **values: object) -> list[str]:
    """The words to run, as a shell would split them. values: of PLACEHOLDERS."""
    return [word.format(**values) for word in shlex.split(command)]
