"""`python -m hpcdist` is the command `hpcdist`."""

from hpcdist.tools.cli import main

main()
