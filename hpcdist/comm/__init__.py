"""Communicators: the protocol (`communicator`), real ranks (`mpi`), virtual ranks (`virtual`)."""
