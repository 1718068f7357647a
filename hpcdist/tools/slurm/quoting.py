"""Validate text for batch scripts, and quote it for Slurm's directives and for the shell."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from pydantic import AfterValidator

from hpcdist.config.merge import load

_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")


def _one_line(text: str) -> str:
    """Refuse several lines: a directive ends at the end of its line, and Slurm has no escape for it."""
    if not text or not text.isprintable():
        raise ValueError(f"must be one line of printable characters; got {text!r}. Take another name.")
    return text


def _shell_text(text: str) -> str:
    """Refuse text with NUL, which ends a C string, or that UTF-8 can't encode. The shell passes on all other bytes."""
    try:
        is_valid = b"\0" not in text.encode()
    except UnicodeEncodeError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"must be text without NUL, in UTF-8; got {text!r}. Take another name.")
    return text


def _first_word(text: str) -> str:
    """Refuse an empty first word of a command, or one that starts with -, which launchers would take for an option."""
    if not _shell_text(text) or text.startswith("-"):
        raise ValueError(f"must not be empty nor start with -; got {text!r}. Write a path, such as ./{text}.")
    return text


def _env_name(text: str) -> str:
    if not _ENV_NAME.fullmatch(text):
        raise ValueError(f"must have names of letters, digits and _; got {text!r}. Rename the variable.")
    return text


def _option(text: str) -> str:
    if not _OPTION.fullmatch(text):
        raise ValueError(f"must name long options of sbatch without --, such as partition; got {text!r}.")
    return text


def _file_name(text: str) -> str:
    r"""Refuse / and \ in a job's name, which is %x in the log's name; Slurm expands nothing in a name with \."""
    if "/" in _one_line(text) or "\\" in text:
        raise ValueError(f"must be a file's name without / and \\; got {text!r}. It is part of the log's name.")
    if (length := len(text.encode())) > 200:  # a file name has at most 255, with the job's number and task
        raise ValueError(f"must have at most 200 bytes; got {length}. It is part of the log's name.")
    return text


def _log_folder(text: str) -> str:
    if "\\" in _one_line(text):
        raise ValueError(f"must be a path without \\, at which Slurm expands no %j; got {text!r}. Rename the folder.")
    return text


def _setting(text: str) -> str:
    load({}, None, [text])
    return text


def _command(command: list[str]) -> list[str]:
    if command and (not command[0] or command[0].startswith("-")):
        raise ValueError(
            f"must start with a program's name; got {command[0]!r}. Launchers would take -x for an option."
        )
    return command


Line = Annotated[str, AfterValidator(_one_line)]  # of a directive
Text = Annotated[str, AfterValidator(_shell_text)]  # a word of a command
FirstWord = Annotated[str, AfterValidator(_first_word)]
EnvName = Annotated[str, AfterValidator(_env_name)]
Option = Annotated[str, AfterValidator(_option)]
FileName = Annotated[str, AfterValidator(_file_name)]
LogFolder = Annotated[str, AfterValidator(_log_folder)]
Setting = Annotated[Text, AfterValidator(_setting)]
Command = Annotated[list[Text], AfterValidator(_command)]


def shell(value: object) -> str:
    return shlex.quote(str(value))


def directive(value: object) -> str:
    r"""Quote the value of a #SBATCH line, where \ escapes within quotes and # starts a comment outside."""
    text = str(value)
    return text if text and _PLAIN.fullmatch(text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def from_directive(text: str) -> str:
    """Unquote the value of a #SBATCH line, as Slurm does; the inverse of `directive`."""
    plain, quote, letters = [], "", iter(text)
    for letter in letters:
        if letter == "\\":
            plain.append(next(letters, ""))
        elif letter == quote:
            quote = ""
        elif letter in "\"'" and not quote:
            quote = letter
        else:
            plain.append(letter)
    return "".join(plain)


def path(text: str) -> str:
    """Prefix a path that starts with - by ./, so that no program takes it for an option."""
    return f"./{text}" if text.startswith("-") else text
