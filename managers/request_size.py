"""How large a request may become inside. A body is bounded already; what it says once and means many times is bounded here.

The parameters of a batch hold for each of its prompts, n samples have the same prompt, and continuations and the items of a score
go on from one prompt: a small body could ask for more than any machine has.
"""

from __future__ import annotations

from collections.abc import Sized

import msgspec

from .errors import RequestError
from .generation import GenerateInput
from .io_struct import GenerateReq, LogprobParams

MAX_CHOICES = 1 << 16  # prompts times n of one request
MAX_COPIED_BYTES = 128 << 20  # of parameters, and of prompts beyond the first sample's, over all choices of a request
MAX_ALTERNATIVES = 8 << 20  # log-probabilities besides those of the prompts' own tokens
MAX_JOINED = 32 << 20  # characters or ids of one prompt put before many continuations


def is_batch(request: GenerateInput) -> bool:
    """Whether checking it may take long, since it has several prompts, or so many parameters."""
    first = request.input_ids[0] if request.input_ids else None
    several = (request.text, request.sampling_params, first, request.continuations)
    return any(isinstance(value, list) for value in several)


def check_choices(num_prompts: int, n: int) -> None:
    """Raises RequestError for more choices than a request may have."""
    if num_prompts * n > MAX_CHOICES:
        raise RequestError(f"A request may have {MAX_CHOICES} choices (prompts times n), got {num_prompts * n}.", param="n")


def check_joined(prompt: Sized, items: Sized, field: str) -> None:
    """Raises RequestError if ``prompt`` before each of the items of ``field`` would be too much text."""
    if len(items) > MAX_CHOICES or len(prompt) * len(items) > MAX_JOINED:
        raise RequestError(
            f"{field}: {len(items)} times the {len(prompt)} characters or ids before them; a request may have {MAX_CHOICES} items,"
            f" and {MAX_JOINED} characters or ids in all.",
            param=field,
        )


class CopyBudget:
    """Of one request: what its choices take that the client sent once, and what it wants to hear of its prompts' tokens."""

    def __init__(self) -> None:
        self._left = MAX_COPIED_BYTES
        self._num_alternatives = 0
        self._encoder = msgspec.msgpack.Encoder()

    def take(self, message: GenerateReq, copies: int) -> None:
        """So many choices are this message. Raises RequestError when all together are too much."""
        sent = len(message.input_ids) + len(message.input_embeds)
        self._left -= len(self._encoder.encode(message)) * copies - sent
        if self._left < 0:
            raise RequestError(
                f"The request is too large: its parameters, which count for each choice, and its prompts, for each sample beyond"
                f" the first, take more than {MAX_COPIED_BYTES >> 20} MiB.",
                param="n" if copies > 1 else "sampling_params",
            )

    def tell(self, logprobs: LogprobParams | None, prompt_len: int, copies: int) -> None:
        """So many choices want these of a prompt. Raises RequestError when all together are too many."""
        if logprobs is None:
            return
        num_ids = len(logprobs.token_ids)
        self._num_alternatives += (prompt_len - logprobs.start_len) * (logprobs.top_num + num_ids) * copies
        if self._num_alternatives > MAX_ALTERNATIVES:
            param = "token_ids_logprob" if num_ids > logprobs.top_num else "top_logprobs_num"
            raise RequestError(
                f"{param}: the prompts have {self._num_alternatives} log-probabilities of alternatives or more, at most"
                f" {MAX_ALTERNATIVES} can be told; ask for fewer, or in several requests.",
                param=param,
            )
