"""Hostile text in every setting: it arrives as it is, or is refused; it never becomes shell or a directive."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.errors import ConfigError
from hpcdist.tools.slurm.quoting import directive
from hpcdist.tools.slurm.render import Script
from hpcdist.tools.slurm.spec import JobSpec, Site
from slurm.fakes import payload, script

PIECES = [
    "$(touch owned)", "`touch owned`", "'", '"', "\\", ";", "&& touch owned", "| tee owned", "\n", "\r",
    "#SBATCH --uid=0", "\n#SBATCH --uid=0\n", "#: why", "\0", "-", "--", " ", "\t", "%", "%j", "{{ 7 * 7 }}",
    "{% if %}", "{#", "${HOME}", "~", "!", "*", ")", "(", "<<EOF", "EOF", "é", "\u2028", "\x85", "\x1b[0m", "a",
]  # fmt: skip
TEXT = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
SHELL_TEXT = TEXT.map(lambda text: text.replace("\0", ""))
WORD = SHELL_TEXT.map(lambda text: f"x{text}")  # not empty, no option
FILE = st.one_of(WORD, SHELL_TEXT.filter(bool))
WORDS = [f"x{chunk}" for chunk in PIECES if chunk != "\0"]  # each of them, in the first example


def sbatch_reads(script: Script) -> list[str]:
    """The options in a script as sbatch reads them: _opt_batch_script and _get_argument of its opt.c."""
    found = []
    for line in script.text.split("\n"):
        if not line.startswith("#SBATCH"):
            if line.strip() and not line.lstrip().startswith("#"):
                break
            continue
        rest = line.removeprefix("#SBATCH").lstrip()
        while rest and not rest.startswith("#"):
            argument, rest = _get_argument(rest)
            found.append(argument)
            rest = rest.lstrip()
    return found


def _get_argument(line: str) -> tuple[str, str]:
    found, quote, escaped = "", "", False
    for at, letter in enumerate(line):
        if not quote and letter.isspace():
            return found, line[at:]
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
            continue
        elif quote:
            if letter == quote:
                quote = ""
                continue
        elif letter in "\"'":
            quote = letter
            continue
        elif letter == "#":
            return found, ""
        found += letter
    assert not quote, "sbatch: fatal: Unmatched quote"
    return found, ""


@given(TEXT)
def test_a_directives_value_is_read_as_it_was_written(text):
    text = "".join(filter(str.isprintable, text))
    assert _get_argument(f"--x={directive(text)}") == (f"--x={text}", "")
    assert "".join(shlex.split(directive(text))) == text


@given(name=TEXT, partition=TEXT, comment=TEXT, output=TEXT)
def test_directives_hold_what_was_asked_or_the_job_is_refused(name, partition, comment, output):
    try:
        site = Site(partition=partition, directives={"add": {"comment": comment}})
        found = script(site, name=name, output=output)
    except ConfigError as error:
        assert any(f"must be {rule}" in str(error) for rule in ("one line", "a file's name", "a path"))
        return
    read = sbatch_reads(found)
    assert f"--job-name={name}" in read and f"--comment={comment}" in read
    assert f"--partition={partition}" in read or partition == "none"
    assert f"--output={output.rstrip('/').replace('%', '%%')}/%x-%j.out" in read
    whole = sbatch_reads(script(Site(partition="p", directives={"add": {"comment": "c"}})))
    assert len(read) == len(whole) - (partition == "none")


@settings(max_examples=12)
@example("".join(WORDS), WORDS[0], WORDS[1:6], "".join(WORDS), WORDS, WORDS, WORDS[6:], "".join(WORDS), WORDS[7])
@given(
    job=FILE, config=FILE, values=st.lists(WORD, max_size=3), env=SHELL_TEXT, container=st.lists(WORD, max_size=2),
    modules=st.lists(WORD, max_size=2), options=st.lists(WORD, max_size=2), interface=TEXT, conda=WORD,
)  # fmt: skip
def test_the_ranks_are_given_what_was_asked(
    bash, job, config, values, env, container, modules, options, interface, conda
):
    assume("none" not in (job, config, conda))
    interface = "".join(filter(str.isprintable, interface)) or "ib0"
    assume(interface != "none")
    asked = [f"model.x={value}" for value in values]
    site = Site(
        container=container, modules=modules, launcher_options=options, interface=interface, conda=conda,
        env={"OTHER": env},
    )  # fmt: skip
    found = script(site, job=job, config=config, settings=asked, env={"HOSTILE": env})
    status, printed = bash.run(found)
    assert status == 0, printed

    def path(text: str) -> str:
        return f"./{text}" if text.startswith("-") else text

    told = [word for setting in ("strategy=allreduce", *asked) for word in ("--set", setting)]
    (arguments,) = bash.launched()
    assert payload(arguments) == [
        *container, "hpcdist", "train", path(job), "--output", "runs/4711", "--resume", "--config", path(config),
        "--set", f"internode=auto:{interface}", *told,
    ]  # fmt: skip
    assert arguments[arguments.index("--unbuffered") + 1 :][: len(options)] == options
    calls = {name: (given, hostile) for name, given, hostile in bash.calls()}
    assert calls["srun"][1] == env
    assert calls["conda"][0] == ["activate", conda]
    assert calls.get("module", (["load"],))[0] == ["load", *modules]
    assert not (bash.folder / "owned").exists()


@settings(max_examples=6)
@example(["", *WORDS], WORDS[0])
@given(command=st.lists(SHELL_TEXT, max_size=3), first=WORD)
def test_a_command_of_ones_own_arrives_as_it_is(bash, command, first):
    status, printed = bash.run(script(job=None, command=[first, *command]))
    assert status == 0, printed
    (arguments,) = bash.launched()
    assert payload(arguments) == [first, *command]
    assert not (bash.folder / "owned").exists()


@settings(max_examples=6)
@example([[], WORDS])
@given(cases=st.lists(st.lists(WORD, max_size=3), min_size=2, max_size=3))
def test_a_case_of_a_study_arrives_as_it_is(bash, cases):
    given = [[f"model.x={value}" for value in case] for case in cases]
    status, printed = bash.run(script(shape="study", cases=given))
    assert status == 0, printed
    (arguments,) = bash.launched()
    told = payload(arguments)
    assert told[told.index("--resume") + 1 :] == [
        word for setting in ("strategy=allreduce", *given[1]) for word in ("--set", setting)
    ]
    assert "runs/4700_1" in told


@settings(max_examples=6)
@example("".join(WORDS), "".join(WORDS))
@given(name=TEXT, partition=TEXT)
def test_salloc_is_given_what_was_asked(bash, name, partition):
    name, partition = ("".join(c for c in text if c.isprintable() and c not in "/\\") for text in (name, partition))
    assume(name and partition and partition != "none")
    site = Site(partition=partition)
    status, printed = bash.run(script(site, shape="interactive", name=name), SLURM_JOB_ID="")
    assert status == 0, printed
    ((_, arguments, _),) = bash.calls()
    assert arguments[:2] == [f"--job-name={name}", f"--partition={partition}"]
    assert arguments[-2:] == ["bash", str(bash.folder / "job.sh")]


@each("name", ["a b$(touch owned);`id`#SBATCH", "-x", "it's", '"', "a\nb", "~"])
def test_folders_of_any_name(bash, name):
    (bash.folder / name / "bin").mkdir(parents=True)
    (bash.folder / name / "bin" / "activate").write_text("export HOSTILE=activated\n")
    (bash.folder / name / "site.sh").write_text("echo sourced\n")
    output = name if name.isprintable() else "out"
    site = Site(venv=name, source=[f"{name}/site.sh"])
    status, printed = bash.run(script(site, output=output))
    assert status == 0 and printed == "sourced\n", printed
    ((_, arguments, hostile),) = [call for call in bash.calls() if call[0] == "srun"]
    folder = f"./{output}/4711" if output.startswith("-") else f"{output}/4711"
    assert hostile == "activated" and folder in payload(arguments)
    assert (bash.folder / folder).is_dir() and not (bash.folder / "owned").exists()


@each("text", ["a\nb", "a\r", "\x85", "\u2028", ""])
def test_what_a_directive_cannot_hold_is_refused(text):
    with pytest.raises(ConfigError, match="must be one line of printable characters"):
        JobSpec(job="it.py", name=text)


def test_a_module_of_the_right_name_is_sourced_from_here_not_from_path(bash):
    (bash.folder / "site.sh").write_text("echo here\n")
    (bash.folder / "bin" / "site.sh").write_text("echo elsewhere\n")
    assert bash.run(script(Site(source=["site.sh"])))[1] == "here\n"
