"""Watch runs while they train: read their folders again and again, and show them in a terminal or as a page."""
