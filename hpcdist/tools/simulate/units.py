"""Read times and bandwidths with their units."""

from __future__ import annotations

import math
import re

from hpcdist.errors import ConfigError

_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?)"
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_BYTES = {"bit": 1 / 8, "B": 1.0}


def seconds(text: str, what: str) -> float:
    """Read a time: `50us`, `20 ms`, `1.5s`, or a number of seconds.

    Args:
        what: the setting, for the message.
    """
    found = re.fullmatch(rf"{_NUMBER} ?(ns|us|µs|ms|s|)", text.strip())
    if found is None:
        raise ConfigError(f"{what} must be a time in ns, us, ms or s; got {text.strip()!r}. Write it as 50us or 20ms.")
    return float(found[1]) * _SECONDS[found[2]]


def bytes_per_second(text: str, what: str) -> float:
    """Read a bandwidth: `10Gbit/s`, `1.25 GB/s`, `100MiB/s`, or `inf` for no limit; others as `seconds`."""
    if text.strip() == "inf":
        return math.inf
    found = re.fullmatch(rf"{_NUMBER} ?(|k|M|G|T|Ki|Mi|Gi)(bit|B)/s", text.strip())
    if found is None:
        raise ConfigError(
            f"{what} must be a bandwidth in bit/s or B/s, with k, M or G before it; got {text.strip()!r}. Write it as "
            "10Gbit/s or 1.25GB/s; inf is no limit."
        )
    return float(found[1]) * _PREFIXES[found[2]] * _BYTES[found[3]]


def number(text: str, what: str) -> float:
    """Read a plain number; others as `seconds`."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{what} must be a number; got {text.strip()!r}.") from None
