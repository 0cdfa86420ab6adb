"""What a gateway tells engines that share a request: where they meet. Checked here; a room says which replica gets a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import RequestError
from .generation import GenerateInput
from .per_prompt import per_prompt

MAX_ROOM = 1 << 63
MAX_PORT = 1 << 16
MAX_HOST_LEN = 255


def rooms_of(request: GenerateInput, num_prompts: int) -> Sequence[int | None]:
    """The room of each prompt. Raises RequestError for a host, a port or a room that cannot be one, and for too few of them."""
    for host in per_prompt(request.bootstrap_host, num_prompts, "bootstrap_host", ""):
        if len(host) > MAX_HOST_LEN or not host.isprintable() or " " in host:
            raise RequestError("bootstrap_host must be the name or address of a host.", param="bootstrap_host")
    no_port: int | None = None
    ports = request.bootstrap_port if isinstance(request.bootstrap_port, list) else [request.bootstrap_port] * num_prompts
    for port in per_prompt(ports, num_prompts, "bootstrap_port", no_port):
        if port is not None and not 0 < port < MAX_PORT:
            raise RequestError(f"bootstrap_port must be in [1, {MAX_PORT}), got {port}.", param="bootstrap_port")
    given = request.bootstrap_room
    if given is None:
        return [None] * num_prompts
    rooms = per_prompt(given, num_prompts, "bootstrap_room", 0) if isinstance(given, list) else range(given, given + num_prompts)
    for room in rooms:
        if not 0 <= room < MAX_ROOM:
            raise RequestError(f"bootstrap_room must be in [0, 2**63), got {room}.", param="bootstrap_room")
    return rooms
