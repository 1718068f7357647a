"""Exit statuses with a meaning of their own."""

LEFT = 75  # a run that left early and should be started again: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # the shell's status for a process that SIGINT ended
