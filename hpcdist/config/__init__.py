"""Settings: read from files and flags, checked, and combined into a training job's configuration."""
