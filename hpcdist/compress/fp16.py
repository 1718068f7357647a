"""fp16: half precision, 11 significant bits."""

from __future__ import annotations

from typing import final

import torch

from hpcdist.compress.coding.casting import Cast


@final
class Fp16(Cast):
    """Round every element to IEEE half precision; magnitudes above 65,504 are sent as that.

    Bytes for n elements: 2n. Error: at most 2⁻¹¹ of each element between 6.1e-5 and 65,504 in magnitude, 3e-8 below;
    the same for all-reduced sums, which are added in full precision and rounded once.

    Reference: Paulius Micikevicius, Sharan Narang, Jonah Alben, Gregory Diamos, Erich Elsen, David Garcia, Boris
    Ginsburg, Michael Houston, Oleksii Kuchaiev, Ganesh Venkatesh, Hao Wu, "Mixed precision training", 2018.
    """

    dtype = torch.float16
