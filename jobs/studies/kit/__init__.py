"""What the studies beside it share: cells and their runs, claims and figures, hosts in namespaces on this machine."""
