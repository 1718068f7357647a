"""The examination of a job's nodes before its run. `cli/doctor.py` has the command, `hpcdist doctor`."""
