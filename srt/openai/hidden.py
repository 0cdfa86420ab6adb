"""Hidden states on the OpenAI routes: of each choice the newest one, told with its finish reason, as SGLang does."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...managers.generation import Output
from ...managers.io_struct import RowHidden


class LastStates:
    """Of the choices of one request."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._newest: dict[int, RowHidden] = {}

    def field(self, output: Output) -> dict[str, Any]:
        """``hidden_states`` for the choice that ends with this output, nothing before that or if they are not wanted."""
        if output.hidden is not None and output.hidden.num:
            self._newest[output.index] = output.hidden
        if not self._wanted or output.finish_reason is None:
            return {}
        row = self._newest.get(output.index)
        return {"hidden_states": [] if row is None else np.frombuffer(row.values, "<f4").reshape(row.num, -1)[-1].tolist()}
