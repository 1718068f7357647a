"""Share a DataLoader among workers: order of samples, equal draws, batches with weights, joint batches in portions."""
