"""Save and resume: atomic, checksummed, no pickle.

A checkpoint is a folder that appears under its name only once it is whole and durable::

    <folder>/step-00001234/
        manifest.json              format, step, ranks, meta; length and sha256 of every other file, and of itself
        rank-0000.json             this rank's state, as a tree
        rank-0000.safetensors      its tensors, named by their paths in the tree; the header has the positions of slices
                                   of larger tensors, and the ranks in whose files common tensors are
        rank-0001.json ...

torch.distributed.checkpoint is not used: its metadata, and its values other than tensors, are pickles. It can't
plan for several ranks without a process group, and has no checksums.
"""

from hpcdist.checkpoint.folder import best_of
from hpcdist.checkpoint.generators import random_state, set_random_state
from hpcdist.checkpoint.load import SavedRank, find, latest, latest_on_all_ranks, survey, verify
from hpcdist.checkpoint.manifest import FILE_NAME as MANIFEST
from hpcdist.checkpoint.manifest import Manifest, read_manifest
from hpcdist.checkpoint.refusal import raise_on_all_ranks, understood
from hpcdist.checkpoint.save import Saver, save
from hpcdist.checkpoint.slices import Slice, SlicePosition
from hpcdist.checkpoint.tensors import check_name, export
