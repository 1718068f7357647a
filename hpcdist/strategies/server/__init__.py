"""Compose strategies with parameter servers: worker loop, server loop, policies, shards, channels, liveness."""
