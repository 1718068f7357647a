"""Validate text for batch scripts, and quote it for Slurm's directives and for the shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator

from hpcdist.config.merge import load

_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)


def _rule(is_valid: Callable[[Any], object], rule: str, advice: str) -> AfterValidator:
    """Return a validator that refuses values by the message `must RULE; got VALUE. ADVICE`."""

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(f"must {rule}; got {value!r}. {advice}")
        return value

    return AfterValidator(check)


def _is_text(text: str) -> bool:
    """Return whether text has no NUL, which ends a C string, and is valid in UTF-8. The shell passes on all others."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _setting(text: str) -> str:
    load({}, None, [text])
    return text


_OF_LOG = "It is part of the log's name."  # where Slurm expands nothing if the name has a \
# A directive ends at the end of its line, and Slurm has no escape for that.
Line = Annotated[
    str, _rule(lambda text: text and text.isprintable(), "be one line of printable characters", "Take another name.")
]
Text = Annotated[str, _rule(_is_text, "be text without NUL, in UTF-8", "Take another name.")]  # a word of a command
FirstWord = Annotated[  # launchers would take -x for an option
    Text, _rule(re.compile("[^-]").match, "not be empty nor start with -", "Write a path, such as ./NAME.")
]
EnvName = Annotated[
    str,
    _rule(
        re.compile("[A-Za-z_][A-Za-z0-9_]*").fullmatch, "have names of letters, digits and _", "Rename the variable."
    ),
]
Option = Annotated[
    str,
    _rule(
        re.compile("[a-z][a-z0-9-]*").fullmatch,
        "name long options of sbatch without --, such as partition",
        "`sbatch --help` lists them.",
    ),
]
FileName = Annotated[  # at most 255 bytes with the job's number and task
    Line,
    _rule(re.compile(r"[^/\\]*").fullmatch, "be a file's name without / and \\", _OF_LOG),
    _rule(lambda text: len(text.encode()) <= 200, "have at most 200 bytes", _OF_LOG),
]
LogFolder = Annotated[
    Line, _rule(lambda text: "\\" not in text, "be a path without \\, at which Slurm expands no %j", "Rename it.")
]
Setting = Annotated[Text, AfterValidator(_setting)]
Command = Annotated[
    list[Text],
    _rule(
        lambda words: not words or re.match("[^-]", words[0]),
        "start with a program's name",
        "Launchers would take -x for an option.",
    ),
]


def shell(value: object) -> str:
    return shlex.quote(str(value))


def directive(value: object) -> str:
    r"""Quote the value of a #SBATCH line, where \ escapes within quotes and # starts a comment outside."""
    text = str(value)
    return text if text and _PLAIN.fullmatch(text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def path(text: str) -> str:
    """Prefix a path that starts with - by ./, so that no program takes it for an option."""
    return f"./{text}" if text.startswith("-") else text
