"""The start-up check, with limits: which nodes and ranks are there, and which of them reach each other."""
