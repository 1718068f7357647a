"""Render a batch script from a job's specification and a site's profile.

A template is a batch script with values in `{{ }}`. Every value is quoted as one word of bash, unless a filter quotes
it differently. A line that starts with `#: ` is the reason for the lines below it, up to the next reason or blank line:
`--explain` shows it, the submitted script omits it.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from hpcdist.config.settings import Settings
from hpcdist.errors import ConfigError
from hpcdist.records import read_bounded
from hpcdist.tools.slurm import quoting
from hpcdist.tools.slurm.spec import JobSpec, Site, folder

REASON = re.compile(r"^( *)#: ", re.M)
MARK = "\0"  # marks a reason; no value contains it (see `quoting`)
COLUMNS = 120


@dataclass(frozen=True)
class Line:
    """A line of a script and its reason, which several lines may share."""

    text: str
    reason: str


@dataclass(frozen=True)
class Script:
    lines: tuple[Line, ...]

    @property
    def text(self) -> str:
        return "".join(f"{line.text}\n" for line in self.lines)

    def with_reasons(self) -> str:
        """Return the script with each reason as a comment above its lines."""
        lines, last_reason = [], ""
        for line in self.lines:
            if line.reason != last_reason and line.reason and line.text != "#!/bin/bash":  # nothing may stand above
                margin = " " * (len(line.text) - len(line.text.lstrip())) + "# "
                lines += textwrap.wrap(line.reason, COLUMNS, initial_indent=margin, subsequent_indent=margin)
            lines.append(line.text)
            last_reason = line.reason
        return "".join(f"{line}\n" for line in lines)


class _Code(str):
    """Text that a filter has already quoted."""


def render(spec: JobSpec, site: Site) -> Script:
    """Render the script of a job on a site; raise ConfigError if a template is missing, invalid, or not permitted."""
    environment = _environment(folder("templates"))
    try:
        if spec.template is None:
            template = environment.get_template(f"{spec.shape}.sh")
        else:
            template = environment.from_string(_read_template(spec.template))
        text = template.render(spec=spec, site=site)
    except SecurityError as error:
        raise ConfigError(
            f"template must take no more than values from spec and site; got {spec.template}, where {error} It may try "
            "to run Python here: do not use it unless you know why."
        ) from None
    except (jinja2.TemplateError, ValueError) as error:  # ValueError: a directive's quote is not closed
        raise ConfigError(
            f"template must be in jinja2 with the names spec and site; got {error} in {spec.template or spec.shape}. "
            "Compare the templates that come with hpcdist."
        ) from None
    return Script(tuple(_lines(text)))


def _read_template(path: str) -> str:
    try:
        return read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template must be a readable file in UTF-8; got {path} ({error}). Check the path.") from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """Render a template, which may be somebody else's, without access to Python: only values of settings."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Settings) and hasattr(Settings, attr):  # pydantic's methods read files and pickles
            return False
        return super().is_safe_attribute(obj, attr, value)


@lru_cache
def _environment(templates: Path) -> jinja2.Environment:
    """Return the Jinja environment that renders templates, with the filters that quote values."""
    environment = _Sandbox(
        loader=jinja2.FileSystemLoader(templates),
        extensions=[_MarksReasons],
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, (_Code, jinja2.Undefined)) else quoting.shell(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{--",  # bash uses the default one: ${#array[@]}
        comment_end_string="--}",
    )
    environment.filters |= {
        "directive": _code(quoting.directive),
        "file": _code(lambda path: quoting.shell(quoting.path(path))),
        "words": _code(lambda words: " ".join(map(quoting.shell, words))),
        "settings": _code(lambda words: " ".join(f"--set {quoting.shell(setting)}" for setting in words)),
        "adapted": _adapted,
        "as_arguments": _as_arguments,
    }
    return environment


def _code(quote: Callable[..., str]) -> Callable[..., _Code]:
    return lambda value: _Code(quote(value))


class _MarksReasons(Extension):
    """Marks reasons in the source of a template, so that a value that looks like a reason is not taken for one."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return REASON.sub(lambda match: match[1] + MARK, source)


def _lines(text: str) -> Iterable[Line]:
    """Split a rendered template into lines, each with the reason above it; an empty line ends a reason's scope."""
    reason, in_reason = "", False
    for line in text.removesuffix("\n").split("\n"):
        if line.lstrip(" ").startswith(MARK):
            part = line.lstrip(" ").removeprefix(MARK)
            reason = f"{reason} {part}" if in_reason else part
            in_reason = True
        else:
            reason = reason if line else ""
            in_reason = False
            yield Line(line, reason)


# --- directives -------------------------------------------------------------------------------------------------------
_DIRECTIVE = re.compile(r"#SBATCH --([a-z][a-z0-9-]*)(?:=(.*))?")


@jinja2.pass_context
def _adapted(context: jinja2.runtime.Context, text: str) -> str:
    """Apply the site's and the job's changes to a template's directives (`text`), and to the reasons above them."""
    by_site, by_job = context["site"].directives, context["spec"].directives
    added = {key: (value, "the site's profile") for key, value in by_site.add.items() if key not in by_job.remove}
    added |= {key: (value, "the job") for key, value in by_job.add.items()}
    removed = {*by_site.remove, *by_job.remove, *added}
    lines, reasons = [], []
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith(MARK):
            reasons.append(line)
        else:
            match = _DIRECTIVE.fullmatch(line)
            lines += [] if match and match[1] in removed else [*reasons, line]
            reasons = []
    for key, (value, origin) in added.items():
        if value is not False:
            text = "" if value is True else f"={quoting.directive(value)}"
            lines += [f"{MARK}Set by {origin}.", f"#SBATCH --{key}{text}"]
    return "".join(f"{line}\n" for line in lines)


def _as_arguments(text: str) -> str:
    """Convert lines with directives to elements of a bash array, for commands that don't read directives."""

    def argument(match: re.Match[str]) -> str:
        value = "" if match[2] is None else f"={''.join(shlex.split(match[2]))}"  # the inverse of `directive`
        return f"        {quoting.shell(f'--{match[1]}{value}')}"

    return "".join(f"{_DIRECTIVE.sub(argument, line)}\n" for line in text.removesuffix("\n").split("\n"))
