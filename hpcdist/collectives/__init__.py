"""All-reduce algorithms, one file each, loaded by the file's name; `auto` chooses among them."""

from __future__ import annotations

from collections.abc import Callable

from hpcdist.collectives.base import AllReduce
from hpcdist.registry import catalogue

available = catalogue("collectives").available
load: Callable[[str], type[AllReduce]] = catalogue("collectives").load
