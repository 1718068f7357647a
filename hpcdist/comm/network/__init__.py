"""This host's network: addresses and TCP connections."""
