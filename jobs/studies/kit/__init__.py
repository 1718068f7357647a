"""What the studies beside it share: groups and their runs, claims and figures, hosts in namespaces on this machine."""
