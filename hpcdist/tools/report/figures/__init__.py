"""The sections of a report's page. A file each: `draw(analysis)` makes its figures, tables and remarks."""
