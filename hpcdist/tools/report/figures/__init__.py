"""The sections of a report's page, one file each: `draw(analysis)` yields figures, tables and notes."""
