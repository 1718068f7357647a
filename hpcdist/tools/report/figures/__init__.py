"""The sections of a report's page. A file each: `draw(findings)` makes its figures, tables and remarks."""
