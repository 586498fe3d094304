"""`free_name.py FOLDER NAME`: NAME, or NAME-2, NAME-3 ...: the first that FOLDER does not have."""

import itertools
import sys
from pathlib import Path

folder, name = sys.argv[1:]
names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
print(next(n for n in names if not (Path(folder) / n).exists()))
