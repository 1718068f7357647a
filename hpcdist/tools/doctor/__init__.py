"""Check a job's nodes before its run: the command `hpcdist doctor` of `cli/doctor.py`."""
