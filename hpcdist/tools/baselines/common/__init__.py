"""The loop and the command that all baselines share."""
