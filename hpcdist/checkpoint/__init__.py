"""Save and resume: atomic, checksummed, no pickle.

A checkpoint is a folder that appears under its name only once it is whole and durable::

    <folder>/step-00001234/
        manifest.json              format, step, ranks, meta; length and sha256 of every other file, and of itself
        rank-0000.json             this rank's state, as a tree
        rank-0000.safetensors      its tensors, each named by its place in the tree; the header says of slices where
        rank-0001.json ...         they lie in their whole tensors

Why not torch.distributed.checkpoint: its metadata, and values that are no tensors, are pickles; without a process group
it has no plan of several ranks; and it keeps no checksums.
"""

from hpcdist.checkpoint.generators import random_state, set_random_state
from hpcdist.checkpoint.load import SavedRank, find, latest, latest_together, survey, verify, verify_together
from hpcdist.checkpoint.manifest import FILE_NAME as MANIFEST
from hpcdist.checkpoint.manifest import Manifest, read_manifest
from hpcdist.checkpoint.refusal import together, understood
from hpcdist.checkpoint.save import save
from hpcdist.checkpoint.slices import Slice, SlicePlace
from hpcdist.checkpoint.tensors import check_name, export

__all__ = [
    "MANIFEST",
    "Manifest",
    "SavedRank",
    "Slice",
    "SlicePlace",
    "check_name",
    "export",
    "find",
    "latest",
    "latest_together",
    "random_state",
    "read_manifest",
    "save",
    "set_random_state",
    "survey",
    "together",
    "understood",
    "verify",
    "verify_together",
]
