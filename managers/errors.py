"""Every exception that leaves the engine."""

from __future__ import annotations


class BanyanError(Exception):
    """Base of the engine's exceptions."""


class RequestError(BanyanError, ValueError):
    """A request that cannot be served as it is. ``param`` names the field, ``status_code`` is the HTTP status."""

    def __init__(
        self, message: str, *, param: str | None = None, status_code: int = 400, err_type: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status_code = status_code
        self.err_type = err_type


class StartError(BanyanError):
    """The engine cannot start; the message says why in one line, ``detail`` may hold a child's traceback."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class EngineDeadError(BanyanError):
    """A process of the engine died; ``detail`` holds its traceback where it left one."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class EngineRestartError(EngineDeadError):
    """A process of the engine died and is started again; a request that had begun to answer is lost, another try may do."""

    def __init__(self) -> None:
        super().__init__("The engine died and is started again.")
