"""The kinds of number in a plan's arithmetic, `(k,)` each. Aliases, so that signatures tell them apart.

plan step, row of the global batch  ->  position of a source in the run  ->  epoch, offset in the epoch
    ->  row of the source, in file order  ->  units that the row holds  ->  pieces (see `pieces.py`)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import UInt64Array

PlanSteps = UInt64Array
"""Steps of a plan; training skips some, and numbers the others anew."""
BatchRows = UInt64Array
"""Rows of a step's global batch, from 0 on."""
StageRows = UInt64Array
"""Whole windows of a stage, from its first one on; each is a row of the batch, or several parts."""
SourceRows = UInt64Array
"""Those of them that a source gives, counted from the stage's first row on."""
Positions = UInt64Array
"""Places of a source in a run: ascending ones are ascending steps and rows of the global batch."""
Epochs = UInt64Array
"""Passes over a source: position p of a source with n rows lies in epoch p // n ..."""
Offsets = UInt64Array
"""... at offset p % n."""
RowNumbers = UInt64Array
"""Rows: an order numbers those of each source from 0, all others through the sources."""
UnitNumbers = UInt64Array
"""Units of rows, through the sources: windows, pieces of documents, samples."""
SourceNumbers = NDArray[np.intp] | int
"""The source of each of k numbers, or one for all."""
