"""All collective calls of a communicator, and not its all-reduces alone."""

from hpcdist.collectives.calls.operations import Collectives
from hpcdist.comm.work import Work
