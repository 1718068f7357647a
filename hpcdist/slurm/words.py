"""Text that may stand in a script: what Slurm's directives and the shell can hold, and how it is quoted there."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from pydantic import AfterValidator

_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")


def _one_line(text: str) -> str:
    """A directive ends with its line, and Slurm has no way to write a line's end within."""
    if not text or not text.isprintable():
        raise ValueError(f"must be one line of printable characters; got {text!r}. Take another name.")
    return text


def _shell_text(text: str) -> str:
    """The shell passes on all bytes but NUL, at which C's strings end."""
    if "\0" in text or not _encodes(text):
        raise ValueError(f"must be text without NUL, in UTF-8; got {text!r}. Take another name.")
    return text


def _first_word(text: str) -> str:
    """The first word of a command: launchers would take one that begins with - for an option of their own."""
    if not _shell_text(text) or text.startswith("-"):
        raise ValueError(f"must not be empty nor begin with -; got {text!r}. Write a path, such as ./{text}.")
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
    r"""%x in a log's name is the job's name. Slurm takes a \ for "expand nothing in this name"."""
    if "/" in _one_line(text) or "\\" in text:
        raise ValueError(f"must be a file's name without / and \\; got {text!r}. It is part of the log's name.")
    return text


def _log_folder(text: str) -> str:
    if "\\" in _one_line(text):
        raise ValueError(f"must be a path without \\, at which Slurm expands no %j; got {text!r}. Rename the folder.")
    return text


Line = Annotated[str, AfterValidator(_one_line)]  # of a directive
Text = Annotated[str, AfterValidator(_shell_text)]  # a word of a command
FirstWord = Annotated[str, AfterValidator(_first_word)]
EnvName = Annotated[str, AfterValidator(_env_name)]
Option = Annotated[str, AfterValidator(_option)]
FileName = Annotated[str, AfterValidator(_file_name)]
LogFolder = Annotated[str, AfterValidator(_log_folder)]


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shell(value: object) -> str:
    """As one word of bash."""
    return shlex.quote(str(value))


def directive(value: object) -> str:
    r"""As one value of a #SBATCH line, where \ escapes within either quotes and # begins a comment outside."""
    text = str(value)
    return text if text and _PLAIN.fullmatch(text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def from_directive(text: str) -> str:
    """What Slurm reads from one argument of a #SBATCH line: the inverse of `directive`."""
    found, quote, letters = [], "", iter(text)
    for letter in letters:
        if letter == "\\":
            found.append(next(letters, ""))
        elif letter == quote:
            quote = ""
        elif letter in "\"'" and not quote:
            quote = letter
        else:
            found.append(letter)
    return "".join(found)


def path(text: str) -> str:
    """The same path, never taken for an option."""
    return f"./{text}" if text.startswith("-") else text
