"""Strategies by their contracts, so that a new one is where it belongs without being named."""

from __future__ import annotations

from hpcdist import strategies
from strategies import problem

CONTRACTS = {name: strategies.load(name).contract for name in problem.stepping()}
SYNCHRONOUS = [name for name, contract in CONTRACTS.items() if contract.synchronous]
SERVED = [name for name, contract in CONTRACTS.items() if contract.ranks == "some serve"]
SERVERLESS = [name for name in SYNCHRONOUS if name not in SERVED]
GOSSIPS = [name for name in CONTRACTS if name not in SYNCHRONOUS and name not in SERVED]
