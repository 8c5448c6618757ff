"""Shows the defaults of `fit` in the API: its arguments are None in the code, since a task may give other defaults."""

from __future__ import annotations

from typing import Any

import griffe

from loop.options import DEFAULTS


class TrueDefaults(griffe.Extension):
    """Puts the default of each option in the place of None."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.path != "loop.fit.fit":
            return
        for parameter in func.parameters:
            if parameter.name in DEFAULTS:
                parameter.default = repr(DEFAULTS[parameter.name])
