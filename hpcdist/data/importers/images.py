"""Folders of image files, one folder per class, also below train, test or val: `datasets` with its defaults."""

from hpcdist.data.importers.datasets import convert as convert
