"""What an Engine can do besides generating text: scores, weights, memory, profiles. Names are SGLang's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..managers.chat_template import ChatTemplate
from ..managers.errors import RequestError
from ..managers.model_service import GROUP, FromDiskInput, FromGroupInput, InitGroupInput, ModelService, ProfileInput, UpdateInput
from ..managers.scoring import ScoreInput, Scores, score
from ..managers.tokenizer_manager import TokenizerManager
from .loop_thread import LoopThread
from .openai.chat_prompt import prompt_ids
from .openai.protocol import ChatBody
from .struct_body import parse_struct

Tensors = bytes | Mapping[str, Any] | Sequence[tuple[str, Any]]


class EngineControl:
    """Methods of Engine that need nothing but its loop and its tokenizer manager. Updates answer (success, message)."""

    tokenizer_manager: TokenizerManager
    _thread: LoopThread
    _models: ModelService

    def score(self, query: str | list[int], items: Any, label_token_ids: list[int], **more: Any) -> Scores:
        """As POST /v1/score: ``scores[i][j]`` is how likely label j comes next after the query and item i.

        more: apply_softmax, item_first.
        """
        given = {"query": query, "items": items, "label_token_ids": label_token_ids, **more}
        return self._thread.call(score(self.tokenizer_manager, parse_struct(ScoreInput, given)))

    async def async_score(self, query: str | list[int], items: Any, label_token_ids: list[int], **more: Any) -> Scores:
        """``score`` on any event loop."""
        given = {"query": query, "items": items, "label_token_ids": label_token_ids, **more}
        return await self._thread.call_async(score(self.tokenizer_manager, parse_struct(ScoreInput, given)))

    def chat_ids(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        """Token ids of a conversation, as the chat route makes them. more: its fields that a template reads."""
        tm = self.tokenizer_manager
        template = ChatTemplate.of(tm.tokenizer, tm.config.chat_template)
        return prompt_ids(template, tm.tokenizer, ChatBody.parse({"messages": messages, **more}))

    def update_weights_from_disk(self, model_path: str, load_format: str | None = None, **more: Any) -> tuple[bool, str]:
        """Load another checkpoint of the same architecture. more: flush_cache, abort_all_requests, weight_version."""
        query = parse_struct(FromDiskInput, {"model_path": model_path, "load_format": load_format, **more})
        reply = self._thread.call(self._models.update_from_disk(query))
        return reply.success, reply.message

    def update_weights_from_tensor(self, named_tensors: Tensors, load_format: str | None = None, **more: Any) -> tuple[bool, str]:
        """Replace some tensors, by their names in a checkpoint: a safetensors file as bytes, or names with torch tensors or numpy
        arrays. more: flush_cache, abort_all_requests, weight_version."""
        query = parse_struct(UpdateInput, {"load_format": load_format, **more})
        path = self._models.spool()
        path.write_bytes(named_tensors if isinstance(named_tensors, bytes) else _serialised(dict(named_tensors)))
        reply = self._thread.call(self._models.update_from_tensors(query, str(path.parent)))
        return reply.success, reply.message

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, *more: str, **named: Any
    ) -> tuple[bool, str]:
        """Join a group in which a trainer, rank 0, which listens there, broadcasts weights. more, named: group_name, backend
        ("nccl"; "gloo" on CPUs), timeout."""
        place = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset, "world_size": world_size}
        names = dict(zip(("group_name", "backend"), more, strict=False))
        reply = self._thread.call(self._models.init_group(parse_struct(InitGroupInput, {**place, **names, **named})))
        return reply.success, reply.message

    def destroy_weights_update_group(self, group_name: str = GROUP) -> tuple[bool, str]:
        """Leave a group."""
        reply = self._thread.call(self._models.destroy_group(group_name))
        return reply.success, reply.message

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[Any], shapes: list[Any], group_name: str = GROUP, **more: Any
    ) -> tuple[bool, str]:
        """Replace tensors, by their names in a checkpoint, by what the trainer of the group broadcasts in this order. more:
        flush_cache, abort_all_requests, weight_version."""
        given = {"names": names, "dtypes": [str(dtype) for dtype in dtypes], "shapes": [list(shape) for shape in shapes]}
        query = parse_struct(FromGroupInput, {**given, "group_name": group_name, **more})
        reply = self._thread.call(self._models.update_from_group(query))
        return reply.success, reply.message

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> tuple[bool, str]:
        """Rename the weights."""
        reply = self._thread.call(self._models.set_version(new_version, abort_all=abort_all_requests))
        return reply.success, reply.message

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[float]:
        """The first values of a tensor by its name in the checkpoint."""
        return self._thread.call(self._models.weights_by_name(name, truncate_size))

    def release_memory_occupation(self, tags: list[Any] | None = None) -> None:
        """Give the memory of "weights" and "kv_cache" back; nothing is computed until it is resumed. RequestError while any request
        holds KV."""
        self._memory(tags, release=True)

    def resume_memory_occupation(self, tags: list[Any] | None = None) -> None:
        """Take the memory again: the same weights, an empty cache."""
        self._memory(tags, release=False)

    def _memory(self, tags: list[Any] | None, *, release: bool) -> None:
        reply = self._thread.call(self._models.memory(tags, release=release))
        if not reply.success:
            raise RequestError(reply.message)

    def start_profile(self, **options: Any) -> None:
        """Record forward steps with torch's profiler; options as the body of POST /start_profile."""
        reply = self._thread.call(self._models.start_profile(parse_struct(ProfileInput, options)))
        if not reply.success:
            raise RequestError(reply.message)

    def stop_profile(self) -> str:
        """The path of the trace."""
        reply = self._thread.call(self._models.stop_profile())
        if not reply.success:
            raise RequestError(reply.message)
        return reply.message


def _serialised(tensors: dict[str, Any]) -> bytes:
    """In safetensors format. Torch is there already if the tensors are torch's."""
    if all(type(tensor).__module__.partition(".")[0] == "numpy" for tensor in tensors.values()):
        from safetensors.numpy import save

        return bytes(save(tensors))
    from safetensors.torch import save as save_torch

    return bytes(save_torch({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))
