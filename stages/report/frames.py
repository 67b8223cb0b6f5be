"""Names for pandas objects in annotations.

pandas annotates most results as one of frame, series and scalar, so that a type checker would object to
nearly every line that is right. `Frame` and `Column` tell the reader which it is, and the checker nothing.
"""

from typing import Any, TypeAlias

Frame: TypeAlias = Any  # pandas.DataFrame
Column: TypeAlias = Any  # pandas.Series
