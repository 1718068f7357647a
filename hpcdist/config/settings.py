"""The base of all settings: frozen, strict, of TOML types, with errors that name the remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hpcdist.errors import ConfigError, suggestion

_REQUIRED: Any = ...
S = TypeVar("S", bound="Settings")
T = TypeVar("T")

# pydantic names Python's types; users write TOML.
_PLAIN_RULES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "list_type": "must be an array",
    "model_type": "must be a table",
    "string_type": "must be a string",
    "tuple_type": "must be an array",
}
LARGEST = 1 << 53  # integer that JSON's readers hold exactly
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_ARGUMENT = re.compile(r"^    ([a-z_]+(?:, [a-z_]+)*): (.+(?:\n {5,}.+)*)", re.M)  # in a docstring's `Args:`


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _Meta
else:
    _Meta = type(pydantic.BaseModel)


class _Refusing(_Meta):
    """Lets `Config(period=0)` raise ConfigError, but no nested settings, whose errors need the whole dotted key."""

    def __call__(cls: type[S], **values: Any) -> S:  # type: ignore[misc]
        return cls.from_mapping(values)


class Settings(pydantic.BaseModel, metaclass=_Refusing):
    """The base of all settings: `class Config(Settings): period: int = Field(1, "...", ge=1)`.

    Types are strict (no "4" for 4, no true for 1), with two exceptions that TOML needs: an array stands for a tuple,
    and "none" for None. Numbers are finite, except where infinity means that there is no limit (`allow_inf_nan`).
    Defaults are not checked. A validator raises ValueError with a whole message, or with a rule that starts with "must"
    and follows the field's key.

    Raises:
        ConfigError: on construction; one line for each setting that breaks its rule.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def from_mapping(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
        """Create settings from a table; `where` is the table's dotted key, for messages."""
        try:
            return cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            raise _refusal(cls, error, where) from None

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _from_toml(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Convert what TOML lacks: "none" to None, and arrays to tuples. Refuse integers that JSON files don't hold."""
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"must be between {-LARGEST} and {LARGEST}; got {value}.")
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, str) and value == "none" and _admits(annotation, NoneType):
            return None
        return _tuples(value) if isinstance(value, list) and _admits(annotation, tuple) else value


def Field(default: T = _REQUIRED, description: str | None = None, **rules: Any) -> T:
    """Return pydantic's Field of a setting: its default, what it means, and rules such as `ge=1`."""
    return pydantic.Field(default, description=description, **rules)  # type: ignore[return-value]


def joint_rule(check: Callable[[Any], None]) -> Any:
    """Mark a method of settings that raises ValueError if several of them don't go together."""

    def checked(settings: S) -> S:
        check(settings)
        return settings

    return pydantic.model_validator(mode="after")(checked)


class MayChange:
    """Marks a setting, in `Annotated`, that does not change what is trained: a resumed run may have another value."""


def without_changeable(model: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of settings without those that are marked `MayChange`."""
    unchangeable: dict[str, Any] = {}
    for name, value in values.items():
        field = model.model_fields.get(name)
        inner = None if field is None else _settings_in(field.annotation)
        if field is None or MayChange not in field.metadata:
            nested = inner is not None and isinstance(value, Mapping)
            unchangeable[name] = without_changeable(inner, value) if nested else value  # type: ignore[arg-type]
    return unchangeable


class Named(Settings):
    """An algorithm's name, or `path/to/file.py:Class`, with its options beside it. A string alone is the name."""

    model_config = pydantic.ConfigDict(extra="allow")

    name: str

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def checked_options(function: Callable[..., Any], options: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Check options of a function or class, its keyword-only arguments, and return them with the defaults."""
    return options_of(function).from_mapping(options, where).model_dump()


def options_of(function: Callable[..., Any]) -> type[Settings]:
    """Create the settings of a function or class: a field, with its description, for each keyword-only argument."""
    maker = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    hints = inspect.get_annotations(maker, eval_str=True)
    fields: dict[str, Any] = {}
    for p in inspect.signature(maker).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            default = ... if p.default is p.empty else p.default
            fields[p.name] = hints[p.name], Field(default, description=meaning(function, p.name))
    return pydantic.create_model("Options", __base__=Settings, **fields)


def meaning(function: Callable[..., Any], argument: str) -> str:
    """Return a docstring's description of an argument; several may share a line, as `height, width: Pixels.`"""
    descriptions = {
        name: text for names, text in _ARGUMENT.findall(inspect.getdoc(function) or "") for name in names.split(", ")
    }
    text = " ".join(descriptions.get(argument, "").split()).removesuffix(".")
    return text[:1].lower() + text[1:]


# --- descriptions -----------------------------------------------------------------------------------------------------
class Option(NamedTuple):
    """A setting as users see it."""

    key: str
    type: str
    default: str  # empty if the setting must be given
    description: str
    rule: str = ""  # as `at least 1`; empty if the type says all
    choices: tuple[str, ...] = ()  # the values, of a type that has few


def describe(model: type[Settings], where: str = "", current: Settings | None = None) -> list[Option]:
    """List all settings of a model, nested ones too, in order of definition; `current` gives other defaults."""
    options = []
    for name, field in model.model_fields.items():
        key, inner = _join(where, name), _settings_in(field.annotation)
        default = _default(field) if current is None else getattr(current, name)
        if inner is not None:
            first, *others = describe(inner, key, default if isinstance(default, inner) else None)
            if field.description and not first.description:  # an algorithm by name: the field of the table describes it
                first = first._replace(default=_default_text(default), description=field.description)
            options += [first, *others]
        else:
            described = (_type_text(field.annotation), _default_text(default), field.description or "")
            options.append(Option(key, *described, _rule_text(field), _choices(field.annotation)))
    return options


# --- errors -----------------------------------------------------------------------------------------------------------
def _refusal(model: type[Settings], error: pydantic.ValidationError, where: str) -> ConfigError:
    """Convert pydantic's error into ours; `where` is the dotted key of the model's table."""
    details = error.errors(include_url=False)
    raised = details[0].get("ctx", {}).get("error")
    if len(details) == 1 and isinstance(raised, ConfigError):
        return raised
    # One line for each key, as each branch of a union has a separate error.
    rules: dict[str, list[str]] = {}
    endings: dict[str, str] = {}
    for detail in details:
        key, rule, ending = _explain(model, detail, where)
        rules.setdefault(key, [])
        if rule not in rules[key]:
            rules[key].append(rule)
        endings[key] = ending
    lines = [f"{key} {' or '.join(rules[key])}{endings[key]}".strip() for key in rules]
    return ConfigError("\n".join(lines))


def _explain(model: type[Settings], detail: ErrorDetails, where: str) -> tuple[str, str, str]:
    """Return (key, rule, ending) of the message `key rule ending` about one of pydantic's errors."""
    loc, kind = detail["loc"], detail["type"]
    if kind == "extra_forbidden":
        parent, _, owner = _locate(model, loc[:-1], where)
        known = sorted(_settings_in(owner).model_fields)  # type: ignore[union-attr]
        name = str(loc[-1])
        elsewhere = [option.key for option in describe(model, where) if option.key.endswith(f".{name}")]
        close = f" Did you mean {' or '.join(elsewhere)}?" if elsewhere else suggestion(name, known)
        rule = f"must be one of {', '.join(known)}; got {name!r}.{close}"
        return f"{parent} setting".strip(), rule, ""
    key, field, _ = _locate(model, loc, where)
    if kind == "missing":
        return key, "must be given; got nothing.", _hint(field)
    if kind == "value_error":
        text = str(detail["ctx"]["error"])
        return (key, text, "") if text.startswith("must") else ("", text, "")
    rule = _PLAIN_RULES.get(kind) or re.sub(r"^\w+ should ", "must ", detail["msg"])
    value = detail["input"]
    close = ""
    if kind == "literal_error" and isinstance(value, str):
        close = suggestion(value, re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return key, rule, f"; got {_short(value)}.{close}{_hint(field)}"


def _locate(model: type[Settings], loc: Iterable[int | str], where: str) -> tuple[str, FieldInfo | None, Any]:
    """Return the dotted key, the field and the value's annotation at `loc`, pydantic's path to an error in `model`."""
    annotation: Any = model
    key, field = where, None
    for part in loc:
        inner = _settings_in(annotation)
        if isinstance(part, int):
            key = f"{key}[{part}]"
        elif inner is not None and part in inner.model_fields:
            field = inner.model_fields[part]
            key, annotation = _join(key, part), field.annotation
        elif _admits(annotation, dict):
            key, annotation = _join(key, part), Any
        # else: pydantic's name for a branch of a union
    return key, field, annotation


def _hint(field: FieldInfo | None) -> str:
    if field is None or not field.description:
        return ""
    default = _default_text(_default(field))
    return f" {field.description[0].upper()}{field.description[1:]}" + (f" (default {default})." if default else ".")


def _default(field: FieldInfo) -> Any:
    """Return a field's default; `...` where it must be given."""
    return ... if field.is_required() else field.get_default(call_default_factory=True)


def _default_text(default: object) -> str:
    if default is ...:
        return ""
    if default is None or isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, Settings):  # its name stands for it
        return repr(getattr(default, "name", default))
    return repr(default)


def _rule_text(field: FieldInfo) -> str:
    limits = [(text, getattr(limit_of, name, None)) for limit_of in field.metadata for name, text in _LIMITS.items()]
    return " and ".join(f"{text} {limit:g}" for text, limit in limits if limit is not None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


# --- types ------------------------------------------------------------------------------------------------------------
def _branches(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _admits(annotation: Any, kind: type) -> bool:
    return any(branch is kind or get_origin(branch) is kind for branch in _branches(annotation))


def _settings_in(annotation: Any) -> type[Settings] | None:
    """Return the class of settings that a field's annotation admits, such as in `CheckpointConfig | None`."""
    for branch in _branches(annotation):
        if get_origin(branch) is None and isinstance(branch, type) and issubclass(branch, Settings):
            return branch
    return None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return all values of a type as texts; () if it has too many to list."""
    if annotation is bool:
        return "true", "false"
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    branches = [branch for branch in _branches(annotation) if branch is not NoneType]
    of_branches = [_choices(branch) for branch in branches] if branches != [annotation] else []
    return sum(of_branches, ()) if all(of_branches) else ()


def _type_text(annotation: Any) -> str:
    if annotation is NoneType:
        return "none"
    if get_origin(annotation) is Annotated:
        return _type_text(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    branches = _branches(annotation)
    if len(branches) > 1:
        return "|".join(map(_type_text, branches))
    if get_origin(annotation) in (tuple, list):
        return f"[{', '.join('...' if arg is ... else _type_text(arg) for arg in get_args(annotation))}]"
    if get_origin(annotation) is dict or annotation is dict:
        return "table"
    return getattr(annotation, "__name__", str(annotation))
