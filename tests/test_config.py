"""Settings: strictness, messages, layers of sources, the job's specification, comparison between ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, field_validator, model_validator

from harness.cases import each
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import changes, describe_changes, differences, fingerprint, load
from hpcdist.config.optimizer import OptimizerConfig, ScheduleConfig, optimizers, schedules
from hpcdist.config.settings import Named, Option, Settings, describe, without_changeable
from hpcdist.errors import ConfigError, UnknownNameError, suggestion


class Inner(Settings):
    period: int = Field(10, ge=1, description="steps between two averages")
    bound: float = math.inf
    betas: tuple[float, float] = (0.9, 0.999)
    grid: tuple[tuple[int, ...], ...] | None = None
    names: list[str] = Field(default_factory=list)
    every: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    overlap: bool | None = None


class Outer(Settings):
    name: str
    inner: Inner = Field(default_factory=Inner)
    maybe: Inner | None = None
    options: dict[str, int] = Field(default_factory=dict)
    even: int = 0

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"must be even; got {value}. Take {value + 1}.")
        return value

    @model_validator(mode="after")
    def _together(self) -> Outer:
        if self.name == "plain" and self.even:
            raise ValueError("even must be 0 for the name plain.")
        if self.name == "known":
            raise UnknownNameError("name", self.name, ["plain"])
        return self


def message(**values) -> str:
    with pytest.raises(ConfigError) as caught:
        Outer(**values)
    return str(caught.value)


# --- settings ---------------------------------------------------------------------------------------------------------
def test_a_toml_table_becomes_settings():
    values = {"period": 3, "bound": 2, "betas": [0.5, 1], "grid": [[1, 2], []], "names": ["a"], "overlap": True}
    inner = Outer(name="x", inner=values, options={"depth": 3}).inner
    assert inner == Inner(
        period=3, bound=2.0, betas=(0.5, 1.0), grid=((1, 2), ()), names=["a"], overlap=True, every="auto"
    )
    assert Inner.from_mapping(values) == inner
    assert Outer(name="x", inner=inner).inner == inner


def test_none_is_written_as_a_word_where_a_setting_may_be_none_and_is_text_elsewhere():
    inner = Inner(grid="none", overlap="none")
    assert inner.grid is None and inner.overlap is None
    assert Outer(name="none", maybe="none") == Outer(name="none")
    with pytest.raises(ConfigError, match="period must be an integer; got 'none'"):
        Inner(period="none")


def test_numbers_are_finite_unless_infinity_means_no_limit():
    for bad in (math.inf, -math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"inner.bound must be a finite number; got (-?inf|nan)"):
            Outer(name="x", inner={"bound": bad})
        with pytest.raises(ConfigError, match=r"inner.betas\[1\] must be a finite number; got (-?inf|nan)"):
            Outer(name="x", inner={"betas": [0.9, bad]})
    assert JobConfig(clip_norm=math.inf, deadline_s=math.inf).clip_norm == math.inf
    with pytest.raises(ConfigError, match="clip_norm must be greater than 0; got nan"):
        JobConfig(clip_norm=math.nan)


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Inner().period = 3


PERIOD = "Steps between two averages (default 10)."


@each(
    "case",
    [
        ({"inner": {"period": 0}}, f"inner.period must be greater than or equal to 1; got 0. {PERIOD}"),
        ({"maybe": {"period": 0}}, f"maybe.period must be greater than or equal to 1; got 0. {PERIOD}"),
        ({"inner": {"period": 1 << 70}}, f"inner.period must be between -{1 << 53} and {1 << 53}; got {1 << 70}."),
        ({"inner": {"period": "4"}}, f"inner.period must be an integer; got '4'. {PERIOD}"),
        ({"inner": {"period": True}}, f"inner.period must be an integer; got True. {PERIOD}"),
        ({"inner": {"period": 4.0}}, f"inner.period must be an integer; got 4.0. {PERIOD}"),
        ({"inner": {"bound": "inf"}}, "inner.bound must be a number; got 'inf'."),
        ({"inner": {"overlap": "True"}}, "inner.overlap must be true or false; got 'True'."),
        ({"inner": {"names": "a"}}, "inner.names must be an array; got 'a'."),
        ({"inner": {"names": ["a", 3]}}, "inner.names[1] must be a string; got 3."),
        ({"inner": {"betas": 0.9}}, "inner.betas must be an array; got 0.9."),
        ({"inner": {"betas": [0.9, "x"]}}, "inner.betas[1] must be a number; got 'x'."),
        ({"inner": {"grid": [[1, 2.5]]}}, "inner.grid[0][1] must be an integer; got 2.5."),
        ({"inner": {"every": 1.5}}, "inner.every must be an integer or must be 'auto'; got 1.5."),
        ({"inner": 3}, "inner must be a table; got 3."),
        ({"options": 3}, "options must be a table; got 3."),
        ({"options": {"depth": "x"}}, "options.depth must be an integer; got 'x'."),
        ({"name": ["x" * 100]}, f"name must be a string; got ['{'x' * 75}...."),
        ({"even": 3}, "even must be even; got 3. Take 4."),
        ({"name": "plain", "even": 2}, "even must be 0 for the name plain."),
        ({"inner": {"perod": 3}},
         "inner setting must be one of betas, bound, every, grid, names, overlap, period; got 'perod'. "
         "Did you mean 'period'?"),
        ({"zzz": 3}, "setting must be one of even, inner, maybe, name, options; got 'zzz'."),
    ],
)  # fmt: skip
def test_a_broken_rule_is_told_with_key_rule_value_and_what_to_do(case):
    values, expected = case
    assert message(**{"name": "x"} | values) == expected


def test_keys_are_told_from_where_the_table_is_and_an_error_of_our_own_tree_passes_as_it_is():
    with pytest.raises(ConfigError, match="^strategy.inner.period must be .*\nstrategy setting must be one of"):
        Outer.from_mapping({"name": "x", "inner": {"period": 0}, "z": 1}, where="strategy")
    with pytest.raises(ConfigError, match="^strategy.even must be even"):
        Outer.from_mapping({"name": "x", "even": 1}, where="strategy")
    with pytest.raises(UnknownNameError, match="^name must be one of plain; got 'known'.$"):
        Outer(name="known")


def test_options_are_described_for_help():
    assert describe(Outer, "job")[:4] == [
        Option("job.name", "str", "", ""),
        Option("job.inner.period", "int", "10", "steps between two averages", "at least 1"),
        Option("job.inner.bound", "float", "inf", ""),
        Option("job.inner.betas", "[float, float]", "(0.9, 0.999)", ""),
    ]
    assert {option.key: option.type for option in describe(Inner)} == {
        "period": "int", "bound": "float", "betas": "[float, float]", "grid": "[[int, ...], ...]|none",
        "names": "[str]", "every": "int|auto", "overlap": "bool|none",
    }  # fmt: skip
    for option in describe(JobConfig):
        assert option.description and option.default, option


def test_a_name_that_is_nearly_right_is_suggested():
    assert suggestion("strateg", ["strategy"]) == " Did you mean 'strategy'?" and suggestion("x", ["strategy"]) == ""
    assert suggestion("adamw", ["Adam", "AdamW"]) == " Did you mean 'AdamW'?", "whatever its case"
    assert str(UnknownNameError("site", "generik", ["generic"])).endswith("got 'generik'. Did you mean 'generic'?")
    assert str(UnknownNameError("site", "x", ["generic"])) == "site must be one of generic; got 'x'."


class Chosen(Settings):
    topology: Named = Field(Named(name="ring"), description="who averages with whom")
    inner: Inner = Field(Inner(), description="the first of which has a description of its own")


def test_a_choice_by_name_is_described_by_its_own_field():
    assert describe(Chosen, "job")[:2] == [
        Option("job.topology.name", "str", "'ring'", "who averages with whom"),
        Option("job.inner.period", "int", "10", "steps between two averages", "at least 1"),
    ]
    assert Chosen.from_mapping({"topology": {"name": "torus", "rows": 2}}).topology.options == {"rows": 2}


# --- the job ----------------------------------------------------------------------------------------------------------
def test_the_settings_that_may_change_are_those_that_the_documentation_lists():
    config = JobConfig().model_dump()
    kept = without_changeable(JobConfig, config)
    changeable = {name for name in config if name not in kept}
    changeable |= {f"data.{name}" for name in config["data"] if name not in kept["data"]}
    changeable |= {f"parallel.{name}" for name in config["parallel"] if name not in kept["parallel"]}
    text = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()
    listed = text.partition("may differ without `--allow-changes`:")[2].partition(".\n")[0]
    named = set(re.findall(r"`([a-z_.]+?)(?:\.\*)?`", listed))
    assert named == changeable


def test_changes_of_settings_have_both_values():
    before = {"optimizer": {"name": "SGD", "lr": 0.1}, "clip": None, "cut": [1], "gone": 1, "log": "a"}
    now = {"optimizer": {"name": "SGD", "lr": 0.01}, "clip": 5, "cut": (1,), "new": 2, "log": "b"}
    found = changes(before, now)
    assert found == {"optimizer.lr": (0.1, 0.01), "clip": (None, 5), "log": ("a", "b")}
    assert describe_changes(found) == "optimizer.lr 0.1 → 0.01, clip none → 5, log a → b"
    other = {"optimizer": {"name": "Adam", "lr": 0.01}}
    assert changes(before, other) == {"optimizer.name": ("SGD", "Adam")}, "options of another one are not compared"


def test_a_job_needs_no_settings_and_takes_names_alone_and_options_of_the_strategy_unseen():
    job = JobConfig()
    assert (job.strategy.name, job.optimizer.name, job.schedule.name) == ("allreduce", "SGD", None)
    saves = job.checkpoint
    assert (saves.every_s, saves.every_steps, saves.keep, saves.best) == (300, 0, 2, True) and job.clip_norm is None
    assert job == JobConfig.from_mapping(job.model_dump())
    job = JobConfig(strategy={"name": "softsync", "splits": 4, "deep": {"er": [1]}}, optimizer="Adam", schedule="none")
    assert job.strategy.options == {"splits": 4, "deep": {"er": [1]}}
    assert JobConfig(strategy="softsync").strategy.options == {}
    assert job.optimizer.name == "Adam" and job.schedule.name is None


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2, 2))


@each("name", sorted(optimizers()))
def test_every_optimizer_of_torch_is_built_by_name(name):
    built = OptimizerConfig(name=name, lr=0.25).build([parameter()])
    assert type(built) is getattr(torch.optim, name) and built.param_groups[0]["lr"] == 0.25
    by_default = OptimizerConfig(name=name).build([parameter()])
    assert by_default.param_groups[0]["lr"] == getattr(torch.optim, name)([parameter()]).param_groups[0]["lr"]


SCHEDULES = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 3]},
    "ConstantLR": {},
    "LinearLR": {"total_iters": 4},
    "ExponentialLR": {"gamma": 0.5},
    "PolynomialLR": {"power": 2.0},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 10},
    "ReduceLROnPlateau": {"patience": 1},
    "LambdaLR": {"lr_lambda": f"{__file__}:halved"},
    "MultiplicativeLR": {"lr_lambda": f"{__file__}:halved"},
    "SequentialLR": {
        "milestones": [4],
        "schedules": [{"name": "LinearLR", "total_iters": 4}, {"name": "CosineAnnealingLR", "T_max": 8}],
    },
    "ChainedScheduler": {"schedules": [{"name": "ConstantLR"}, {"name": "ExponentialLR", "gamma": 0.5}]},
}


def halved(step: int) -> float:
    """For LambdaLR and MultiplicativeLR."""
    return 0.5**step


@each("name", sorted({*schedules(), *SCHEDULES}))
def test_every_schedule_of_torch_is_built_by_name(name):
    job = JobConfig(optimizer={"momentum": 0.5, "lr": 0.1}, schedule={"name": name, **SCHEDULES[name]})
    optimizer = job.optimizer.build([parameter()])
    built = job.schedule.build(optimizer)
    assert type(built) is getattr(torch.optim.lr_scheduler, name) and built.optimizer is optimizer
    assert ScheduleConfig().build(optimizer) is None


@each(
    "case",
    [
        ({"optimizer": {"name": "adamw"}}, "optimizer.name must be one of ASGD, .*; got 'adamw'. Did you mean 'AdamW'"),
        ({"optimizer": {"momentun": 0.9}}, "optimizer option must be one of .* for SGD; got 'momentun'. Did you"),
        ({"optimizer": {"params": []}}, "optimizer option must be one of .* for SGD; got 'params'."),
        ({"optimizer": {"momentum": -1.0}}, "optimizer options must suit torch's SGD; got .'momentum': -1.0. .Invalid"),
        ({"optimizer": {"name": "Adam", "betas": 3}}, "optimizer options must suit torch's Adam; got "),
        ({"optimizer": {"lr": -0.1}}, "optimizer.lr must be greater than or equal to 0; got -0.1. Learning rate"),
        ({"schedule": {"name": "StpLR"}}, "schedule.name must be one of .*StepLR; got 'StpLR'"),
        ({"schedule": "LambdaLR"}, "schedule options must suit torch's LambdaLR; got .* missing .*'lr_lambda'"),
        ({"schedule": {"name": "LambdaLR", "lr_lambda": "f"}}, "schedule.lr_lambda must be path/to/file.py:function"),
        ({"schedule": {"name": "SequentialLR", "milestones": [2]}},
         "schedule.schedules must be given with ChainedScheduler and SequentialLR, and only there; got none with Seq"),
        ({"schedule": {"name": "StepLR", "step_size": 2, "schedules": [{"name": "ConstantLR"}]}},
         "schedule.schedules must be given with .* and SequentialLR, and only there; got 1 with StepLR"),
        ({"schedule": {"name": "SequentialLR", "milestones": [2], "schedules": [{"name": "ConstntLR"}] * 2}},
         "schedule.schedules.name must be one of .*; got 'ConstntLR'. Did you mean 'ConstantLR'"),
        ({"schedule": {"name": "SequentialLR", "milestones": [2, 3], "schedules": [{"name": "ConstantLR"}] * 2}},
         "schedule options must suit torch's SequentialLR; got .'milestones': .2, 3.. .Sequential"),
        ({"schedule": {"name": "ChainedScheduler", "schedules": [{"name": "ReduceLROnPlateau"}]}},
         "schedule.schedules must be schedules that advance by themselves; got ReduceLROnPlateau, which looks at"),
        ({"schedule": {"warmup_steps": 5}}, "schedule.per must be step with schedule.warmup_steps; got 'epoch'."),
        ({"schedule": {"name": "OneCycleLR", "max_lr": 1.0, "total_steps": 9, "warmup_steps": 5, "per": "step"}},
         "schedule.warmup_steps must be omitted with OneCycleLR; got 5."),
        ({"schedule": {"warmup_from": 0.5}}, "schedule.warmup_steps must be given with schedule.warmup_from; got no"),
        ({"schedule": {"warmup_from": 1.5}}, "schedule.warmup_from must be less than or equal to 1; got 1.5"),
        ({"optimizer": {"scale": "linear"}},
         "optimizer.scale and optimizer.reference_batch must be given together; got 'linear' and none."),
        ({"optimizer": {"reference_batch": 32}},
         "optimizer.scale and optimizer.reference_batch must be given together; got 'none' and 32."),
        ({"optimizer": {"scale": "linear", "reference_batch": 32},
          "schedule": {"name": "OneCycleLR", "max_lr": 1.0, "total_steps": 9}},
         "optimizer.scale must be none with OneCycleLR, whose own options say the rates; got 'linear'."),
        ({"schedule": "StepLR"}, "schedule options must suit torch's StepLR; got .* missing .*'step_size'"),
        ({"schedule": {"name": "StepLR", "steps": 2}}, "schedule option must be one of .* for StepLR; got 'steps'"),
        ({"schedule": {"gamma": 0.5}}, "schedule.name must be given with the options gamma; got none"),
        ({"schedule": {"name": "CyclicLR", "base_lr": 0.1, "max_lr": 1.0}, "optimizer": {"name": "Adagrad"}},
         "schedule options must suit torch's CyclicLR; got .* .optimizer must support momentum"),
        ({"strategy": {"splits": [1]}, "bach_size": 3}, "setting must be one of .*; got 'bach_size'. Did you mean 'b"),
        ({"strategy": 3}, "strategy must be a table; got 3"),
        ({"clip_norm": 0}, "clip_norm must be greater than 0; got 0"),
        ({"amp": "fp8"}, "amp must be 'off', 'bf16' or 'fp16'; got 'fp8'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be 'stop' or 'skip'; got 'ignore'"),
        ({"seed": 2**32}, "seed must be less than 4294967296; got 4294967296"),
        ({"batch_size": 0, "epochs": 0}, "epochs must be .* 1; got 0.*\nbatch_size must be .* 1; got 0. Samples"),
        ({"output": ""}, "output must have at least 1 character; got ''"),
        ({"deadline_s": math.nan}, "deadline_s must be greater than 0; got nan"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep must be greater than or equal to 1; got 0"),
    ],
)  # fmt: skip
def test_a_bad_job_is_refused(case):
    values, expected = case
    with pytest.raises(ConfigError, match=f"^{expected}"):
        JobConfig(**values)


# --- layers -----------------------------------------------------------------------------------------------------------
DEFAULTS = {"epochs": 3, "strategy": {"name": "allreduce", "bucket_mb": 4}, "model": {"width": 8, "act": {"f": "relu"}}}


def test_flags_win_over_the_file_which_wins_over_the_defaults(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('epochs = 5\nseed = 2\n[model]\nact = {f = "tanh"}\n', encoding="utf-8")
    flags = ["seed=3", "model.width=16", "model.act.slope=0.5", "seed=4", "new.table.x=[1, 2]"]
    assert load(DEFAULTS, file, flags) == {
        "epochs": 5,
        "seed": 4,
        "strategy": {"name": "allreduce", "bucket_mb": 4},
        "model": {"width": 16, "act": {"f": "tanh", "slope": 0.5}},
        "new": {"table": {"x": [1, 2]}},
    }
    assert DEFAULTS["model"] == {"width": 8, "act": {"f": "relu"}}, "the defaults were changed"
    merged = load(DEFAULTS)
    merged["model"]["act"]["f"] = "gelu"
    assert DEFAULTS["model"]["act"]["f"] == "relu"


@each(
    "case",
    [
        (["strategy.bucket_mb=8"], {"name": "allreduce", "bucket_mb": 8}),
        (["strategy.name=allreduce"], {"name": "allreduce", "bucket_mb": 4}),
        (["strategy=allreduce"], {"name": "allreduce", "bucket_mb": 4}),
        (["strategy.name=softsync"], {"name": "softsync"}),
        (["strategy=softsync"], {"name": "softsync"}),
        (["strategy.splits=2", "strategy.name=softsync"], {"name": "softsync", "splits": 2}),
        (["strategy=softsync", "strategy.splits=2"], {"name": "softsync", "splits": 2}),
        (['strategy={name="softsync", splits=2}'], {"name": "softsync", "splits": 2}),
    ],
)
def test_another_name_drops_the_options_of_the_former(case):
    flags, strategy = case
    assert load(DEFAULTS, overrides=flags)["strategy"] == strategy


def test_a_name_alone_below_keeps_its_name_when_options_are_added():
    assert load({"optimizer": "Adam"}, overrides=["optimizer.lr=0.1"]) == {"optimizer": {"name": "Adam", "lr": 0.1}}
    assert load({"model": {"width": 8}}, overrides=["model=wide"]) == {"model": "wide"}, "no table with a name"


@each(
    "case",
    [
        ("4", 4), ("-4", -4), ("1e-3", 1e-3), ("-1.5e+300", -1.5e300), ("0x10", 16), ("inf", math.inf),
        ("true", True), ("False", "False"), ("[1, 2.5, 'a']", [1, 2.5, "a"]), ("[]", []), ("{a = 1}", {"a": 1}),
        ("softsync", "softsync"), ("data/digits.h5", "data/digits.h5"), ("a b", "a b"), ("a=b", "a=b"), ("", ""),
        ('"4"', "4"), ("'a b'", "a b"), ("2024-01-31", "2024-01-31"), ("10:30:00", "10:30:00"),
        ("1\nother = 2", "1\nother = 2"), ("1.2.3", "1.2.3"), ("none", "none"),
    ],
)  # fmt: skip
def test_a_flags_value_is_toml_or_a_bare_word(case):
    text, value = case
    parsed = load({}, overrides=[f"x-1.y_2={text}"])["x-1"]["y_2"]
    assert parsed == value and type(parsed) is type(value)


@each(
    "case",
    [
        *((flag, f"--set must be key=value, such as strategy.period=4; got '{flag}'.") for flag in
          ("epochs", "=4", "a..b=4", "a b=4")),
        ("a=[1, 2", "--set a=[1, 2: the value must be TOML or a bare word; got "),
        ("a='b", "--set a='b: the value must be TOML or a bare word; got "),
        (f"a={'9' * 5000}", "the value must be TOML or a bare word; got Exceeds the limit"),
        (f"a={'[' * 3000}{']' * 3000}", "the value must be TOML or a bare word; got maximum recursion depth"),
    ],
)  # fmt: skip
def test_a_malformed_flag_is_refused(case):
    flag, expected = case
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load({}, overrides=[flag])
    with pytest.raises(ConfigError, match=r"--set a.b=2: a must be a table; got 1 by an earlier --set."):
        load({}, overrides=["a=1", "a.b=2"])


@each(
    "case",
    [
        (b"epochs = 3\nseed = \n", r"job.toml:2 must be TOML; got an error: Invalid value"),
        (b"epochs = 3\n\nstrategy = softsync\n", r"job.toml:3 must be TOML; .* Strings need quotes there."),
        (b"a = 1\na = 2\n", r"job.toml:2 must be TOML; got an error: Cannot overwrite a value"),
        (b"[a", r"job.toml(:1)? must be TOML; got an error"),
        (b"a = " + b"[" * 3000 + b"]" * 3000, r"job.toml must be TOML; got an error: maximum recursion depth"),
        (b"a = " + b"9" * 5000, r"job.toml must be TOML; got an error: Exceeds the limit .* Write simpler values."),
        (b"name = '\xff'\n", r"job.toml must be TOML in UTF-8; got other bytes at offset 8"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, case):
    content, expected = case
    file = tmp_path / "job.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        load({}, file)


def test_a_missing_or_unreadable_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"configuration file must exist; got .*none.toml. Check the path."):
        load({}, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"configuration file must be readable; got .* \(Is a directory\)"):
        load({}, tmp_path)


# --- comparison -------------------------------------------------------------------------------------------------------
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
tables = st.recursive(
    plain | st.lists(plain, max_size=3), lambda t: st.dictionaries(st.text("ab", max_size=2), t), max_leaves=8
)
configs = st.dictionaries(st.sampled_from("abc"), tables, max_size=3)


def shuffled(value):
    return {k: shuffled(value[k]) for k in reversed(value)} if isinstance(value, dict) else value


@settings(max_examples=15)
@given(a=configs, b=configs)
def test_fingerprints_agree_exactly_where_there_are_no_differences(a, b):
    assert (fingerprint(a) == fingerprint(b)) == (differences(a, b) == []) == (differences(b, a) == [])
    assert fingerprint(a) == fingerprint(shuffled(a)) and differences(a, shuffled(a)) == []


def test_differences_name_the_key_and_both_values():
    a = {"lr": 0.1, "strategy": {"name": "x", "n": 1}, "same": [1], "model": {}, "rate": math.nan}
    b = {"lr": 0.2, "strategy": {"name": "x", "n": 1.0}, "same": [1], "model": {"width": 3}, "rate": math.nan}
    assert differences(a, b) == [
        "lr: 0.1 against 0.2",
        "strategy.n: 1 against 1.0",
        "model: {} against nothing",
        "model.width: nothing against 3",
    ]
    job, other = (JobConfig(seed=seed).model_dump() for seed in (1, 2))
    assert differences(job, other) == ["seed: 1 against 2"]
    assert fingerprint(job) == fingerprint(JobConfig(seed=1).model_dump()) != fingerprint(other)
    assert re.fullmatch("[0-9a-f]{64}", fingerprint({}))
