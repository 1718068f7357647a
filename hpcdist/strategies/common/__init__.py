"""Parts that all strategies share."""
