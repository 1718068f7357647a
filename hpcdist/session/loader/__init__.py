"""Distribute a DataLoader's samples among workers: order, equal numbers of steps, weights, joint batches."""
