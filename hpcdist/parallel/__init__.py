"""Model parallelism: models cut into stages, one or several per rank, and grids of ranks that hold copies of them."""

from hpcdist.parallel.cut import Cut, balance, by_hand
from hpcdist.parallel.grid import Grid
from hpcdist.parallel.layers import Chain
from hpcdist.parallel.pipeline import Pipeline
