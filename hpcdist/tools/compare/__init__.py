"""Comparisons of strategies on one job: a list of runs that is fixed before the first, and what runs each of them."""
