"""`python -m hpcdist` is the command `hpcdist`."""

from hpcdist.cli import main

main()
