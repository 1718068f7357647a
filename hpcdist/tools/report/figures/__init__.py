"""The sections of a report's page. A file each: `draw(findings)` makes its figures, tables and remarks."""

from hpcdist.registry import catalogue

available = catalogue("figures").available
load = catalogue("figures").load
