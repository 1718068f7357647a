"""From a job's specification and a site's profile to the text of a batch script. Pure, but for reading templates.

A template is a batch script with values in `{{ }}`. Every value is quoted for bash unless a filter has quoted it
otherwise, so that none can end its word. A line that begins with `#: ` is the reason for what follows, up to the next
reason or blank line: `--explain` shows it, a script to be submitted does without.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jinja2

from hpcdist.errors import ConfigError
from hpcdist.slurm import words
from hpcdist.slurm.site import Site, folder
from hpcdist.slurm.spec import JobSpec

REASON = re.compile(r"^( *)#: ", re.M)
MARK = "\0"  # before a reason; no value holds it (`words`)
COLUMNS = 120


@dataclass(frozen=True)
class Line:
    """A line of a script, and why it is there; the reason may be that of a line before it."""

    text: str
    reason: str


@dataclass(frozen=True)
class Script:
    """A batch script."""

    lines: tuple[Line, ...]
    batch: bool  # for sbatch; otherwise bash runs it, and it asks for nodes itself

    @property
    def text(self) -> str:
        """What is submitted."""
        return "".join(f"{line.text}\n" for line in self.lines)

    def with_reasons(self) -> str:
        """The same script, each reason above its lines as a comment."""
        shown, last = [], ""
        for line in self.lines:
            if line.reason != last and line.reason and line.text != "#!/bin/bash":
                margin = " " * (len(line.text) - len(line.text.lstrip())) + "# "
                shown += textwrap.wrap(line.reason, COLUMNS, initial_indent=margin, subsequent_indent=margin)
            shown.append(line.text)
            last = line.reason
        return "".join(f"{line}\n" for line in shown)


class _Code(str):
    """Text that a filter has made fit to stand in the script."""


def render(spec: JobSpec, site: Site) -> Script:
    """The script of a job on a site.

    Raises:
        ConfigError: a template is missing or has a mistake.
    """
    environment = _environment(folder("templates"))
    try:
        if spec.template is None:
            template = environment.get_template(f"{spec.shape}.sh")
        else:
            template = environment.from_string(_marked(_own(spec.template)))
        text = template.render(spec=spec, site=site)
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"template must be in jinja2 with the names spec and site; got {error} in {spec.template or spec.shape}. "
            "Compare the templates that come with hpcdist."
        ) from None
    return Script(tuple(_lines(text)), batch=spec.shape != "interactive")


def _own(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template must be a readable file in UTF-8; got {path} ({error}). Check the path.") from None


@lru_cache
def _environment(templates: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=_Templates(templates),
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, (_Code, jinja2.Undefined)) else words.shell(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{--",  # bash has its own use for the usual one: ${#array[@]}
        comment_end_string="--}",
    )
    environment.filters |= {
        "directive": _code(words.directive),
        "file": _code(lambda path: words.shell(words.path(path))),
        "words": _code(lambda given: " ".join(map(words.shell, given))),
        "settings": _code(lambda given: " ".join(f"--set {words.shell(setting)}" for setting in given)),
        "adapted": _adapted,
        "as_arguments": _as_arguments,
    }
    return environment


def _code(quote: Callable[..., str]) -> Callable[..., _Code]:
    return lambda value: _Code(quote(value))


class _Templates(jinja2.FileSystemLoader):
    """Reads templates with their reasons marked. Marks survive, where values that look like reasons have none."""

    def get_source(self, environment: jinja2.Environment, template: str):
        source, path, fresh = super().get_source(environment, template)
        return _marked(source), path, fresh


def _marked(source: str) -> str:
    return REASON.sub(lambda found: found[1] + MARK, source)


def _lines(text: str) -> Iterable[Line]:
    reason, in_reason = "", False
    for line in text.removesuffix("\n").split("\n"):
        if line.lstrip(" ").startswith(MARK):
            told = line.lstrip(" ").removeprefix(MARK)
            reason = f"{reason} {told}" if in_reason else told
            in_reason = True
        else:
            reason = reason if line else ""
            in_reason = False
            yield Line(line, reason)


# --- directives -------------------------------------------------------------------------------------------------------
_DIRECTIVE = re.compile(r"#SBATCH --([a-z][a-z0-9-]*)(?:=(.*))?")


@jinja2.pass_context
def _adapted(context: jinja2.runtime.Context, text: str) -> str:
    """A template's directives without those that the site or the job removes or sets, and with those that they add."""
    by_site, by_job = context["site"].directives, context["spec"].directives
    added = {key: (value, "the site's profile") for key, value in by_site.add.items() if key not in by_job.remove}
    added |= {key: (value, "the job") for key, value in by_job.add.items()}
    gone = {*by_site.remove, *by_job.remove, *added}
    kept, reasons = [], []
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith(MARK):
            reasons.append(line)
        else:
            found = _DIRECTIVE.fullmatch(line)
            kept += [] if found and found[1] in gone else [*reasons, line]
            reasons = []
    for key, (value, whose) in added.items():
        if value is not False:
            kept += [f"{MARK}Asked for by {whose}.", f"#SBATCH --{key}{_value(value)}"]
    return "".join(f"{line}\n" for line in kept)


def _value(value: object) -> str:
    return "" if value is True else f"={words.directive(value)}"


def _as_arguments(text: str) -> str:
    """Directives as words of an array in bash, for commands that read no directives."""

    def argument(found: re.Match[str]) -> str:
        value = "" if found[2] is None else f"={words.from_directive(found[2])}"
        return f"        {words.shell(f'--{found[1]}{value}')}"

    return "".join(f"{_DIRECTIVE.sub(argument, line)}\n" for line in text.removesuffix("\n").split("\n"))
