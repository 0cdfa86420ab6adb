"""What happens to a grammar before the scheduler hears of its request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from banyan.managers.config import TokenizerManagerConfig
from banyan.managers.constrained.service import GrammarService
from banyan.managers.errors import RequestError
from banyan.managers.io_struct import GenerateReq
from banyan.managers.ipc import IpcNames
from banyan.managers.sampling_params import SamplingParams

IPC = IpcNames(directory="/nowhere", scheduler="", detokenizer="", tokenizer="")


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_without_a_backend_a_grammar_is_refused_and_never_dropped(kind: str) -> None:
    config = TokenizerManagerConfig(ipc=IPC, model_path="m", served_model_name="m", tokenizer_path="m", grammar_backend="none")
    info: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=300, eos_token_ids=[2]))
    nothing: Any = None
    service = GrammarService(config, info, tokenizer_stop_ids=(), calls=nothing, send=nothing, stats=nothing)
    params: dict[str, Any] = {kind: "a"}
    constrained = GenerateReq(rid="r", input_ids=b"", sampling_params=SamplingParams(**params))
    free = GenerateReq(rid="f", input_ids=b"", sampling_params=SamplingParams())
    with pytest.raises(RequestError, match="switched off") as caught:
        asyncio.run(service.attach([free, constrained]))
    assert (caught.value.status_code, caught.value.param) == (400, kind)
    assert service.num_waiting == 0
    asyncio.run(service.attach([free]))
