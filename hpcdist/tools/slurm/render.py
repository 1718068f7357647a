"""Render a batch script from a job's specification and a site's profile. Pure, but for reading templates.

A template is a batch script with values in `{{ }}`. Every value is quoted for bash unless a filter has quoted it
otherwise, so that it stays one word. A line that begins with `#: ` is the reason for the lines below it, up to the next
reason or blank line: `--explain` shows it, and the script that is submitted leaves it out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from hpcdist.config.settings import Settings
from hpcdist.errors import ConfigError
from hpcdist.records import read_bounded
from hpcdist.tools.slurm import quoting
from hpcdist.tools.slurm.spec import JobSpec, Site, folder

REASON = re.compile(r"^( *)#: ", re.M)
MARK = "\0"  # before a reason; no value holds it (see `quoting`)
COLUMNS = 120


@dataclass(frozen=True)
class Line:
    """A line of a script, and the reason for it, which several lines may share."""

    text: str
    reason: str


@dataclass(frozen=True)
class Script:
    """A batch script."""

    lines: tuple[Line, ...]
    batch: bool  # for sbatch; otherwise bash runs it, and it allocates nodes itself

    @property
    def text(self) -> str:
        """Return the script as it is submitted."""
        return "".join(f"{line.text}\n" for line in self.lines)

    def with_reasons(self) -> str:
        """Return the script with each reason as a comment above its lines."""
        shown, last = [], ""
        for line in self.lines:
            if line.reason != last and line.reason and line.text != "#!/bin/bash":
                margin = " " * (len(line.text) - len(line.text.lstrip())) + "# "
                shown += textwrap.wrap(line.reason, COLUMNS, initial_indent=margin, subsequent_indent=margin)
            shown.append(line.text)
            last = line.reason
        return "".join(f"{line}\n" for line in shown)


class _Code(str):
    """Text that a filter has quoted already."""


def render(spec: JobSpec, site: Site) -> Script:
    """Render the script of a job on a site.

    Raises:
        ConfigError: a template is missing, has a mistake, or asks for more than the values of settings.
    """
    environment = _environment(folder("templates"))
    try:
        if spec.template is None:
            template = environment.get_template(f"{spec.shape}.sh")
        else:
            template = environment.from_string(_marked(_own(spec.template)))
        text = template.render(spec=spec, site=site)
    except SecurityError as error:
        raise ConfigError(
            f"template must take no more than values from spec and site; got {spec.template}, where {error} It may "
            "be meant to run Python here: do not use it unless you know why."
        ) from None
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"template must be in jinja2 with the names spec and site; got {error} in {spec.template or spec.shape}. "
            "Compare the templates that come with hpcdist."
        ) from None
    return Script(tuple(_lines(text)), batch=spec.shape != "interactive")


def _own(path: str) -> str:
    try:
        return read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template must be a readable file in UTF-8; got {path} ({error}). Check the path.") from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """Runs a template, which may be somebody else's, without access to Python: it gets settings as values."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Settings) and hasattr(Settings, attr):  # pydantic's: it reads files and pickles
            return False
        return super().is_safe_attribute(obj, attr, value)


@lru_cache
def _environment(templates: Path) -> jinja2.Environment:
    environment = _Sandbox(
        loader=_Templates(templates),
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, (_Code, jinja2.Undefined)) else quoting.shell(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{--",  # bash has its own use for the usual one: ${#array[@]}
        comment_end_string="--}",
    )
    environment.filters |= {
        "directive": _code(quoting.directive),
        "file": _code(lambda path: quoting.shell(quoting.path(path))),
        "words": _code(lambda given: " ".join(map(quoting.shell, given))),
        "settings": _code(lambda given: " ".join(f"--set {quoting.shell(setting)}" for setting in given)),
        "adapted": _adapted,
        "as_arguments": _as_arguments,
    }
    return environment


def _code(quote: Callable[..., str]) -> Callable[..., _Code]:
    return lambda value: _Code(quote(value))


class _Templates(jinja2.FileSystemLoader):
    """A loader that marks the reasons of templates, so that a value that looks like a reason is not taken for one."""

    def get_source(self, environment: jinja2.Environment, template: str):
        source, path, fresh = super().get_source(environment, template)
        return _marked(source), path, fresh


def _marked(source: str) -> str:
    return REASON.sub(lambda match: match[1] + MARK, source)


def _lines(text: str) -> Iterable[Line]:
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
    """Change a template's directives as the site and the job say: remove some, set some, add others."""
    by_site, by_job = context["site"].directives, context["spec"].directives
    added = {key: (value, "the site's profile") for key, value in by_site.add.items() if key not in by_job.remove}
    added |= {key: (value, "the job") for key, value in by_job.add.items()}
    gone = {*by_site.remove, *by_job.remove, *added}
    lines, reasons = [], []
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith(MARK):
            reasons.append(line)
        else:
            match = _DIRECTIVE.fullmatch(line)
            lines += [] if match and match[1] in gone else [*reasons, line]
            reasons = []
    for key, (value, whose) in added.items():
        if value is not False:
            text = "" if value is True else f"={quoting.directive(value)}"
            lines += [f"{MARK}Asked for by {whose}.", f"#SBATCH --{key}{text}"]
    return "".join(f"{line}\n" for line in lines)


def _as_arguments(text: str) -> str:
    """Turn directives into words of an array in bash, for commands that read no directives."""

    def argument(match: re.Match[str]) -> str:
        value = "" if match[2] is None else f"={quoting.from_directive(match[2])}"
        return f"        {quoting.shell(f'--{match[1]}{value}')}"

    return "".join(f"{_DIRECTIVE.sub(argument, line)}\n" for line in text.removesuffix("\n").split("\n"))
