"""Follow runs while they train: poll their folders, and show them in a terminal or on a web page."""
