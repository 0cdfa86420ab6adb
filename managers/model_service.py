"""What trainers and developers ask of the model behind the scheduler: other weights, memory for a while, profiles."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..model_executor.step import GroupSpec, ProfileSpec, TensorSpec
from .errors import RequestError
from .io_struct import ControlReply, MemoryReq, ProfileReq, ReadWeightReq, UpdateWeightsReq, WeightsGroupReq
from .tokenizer_manager import TokenizerManager

TENSORS = "model.safetensors"
MAX_TRUNCATE = 1 << 20
Tag = Literal["weights", "kv_cache", "cuda_graph"]
GROUP = "weight_update_group"
GROUP_TIMEOUT = 60.0  # seconds within which all members of a group must have come, and within which each tensor must
MAX_TENSORS = 100_000
MAX_STEPS = 1 << 31  # of a profile
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 36  # of one tensor


class UpdateInput(msgspec.Struct, kw_only=True):
    """What updates of the weights have in common. flush_cache: forget the KV of the old weights."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class FromDiskInput(UpdateInput, kw_only=True):
    """Body of /update_weights_from_disk. model_path: a folder in HF layout or a .gguf file on the server's machine."""

    model_path: str


class InitGroupInput(msgspec.Struct, kw_only=True):
    """Body of /init_weights_update_group: a trainer listens at master_address:master_port as rank 0, the ranks here come from
    rank_offset on, replica by replica. world_size counts them all. timeout: seconds, at most 600."""

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1
    world_size: Annotated[int, msgspec.Meta(ge=2, le=65536)]
    group_name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = GROUP
    backend: Literal["gloo", "nccl"] = "nccl"
    timeout: Annotated[float, msgspec.Meta(gt=0, le=600)] = GROUP_TIMEOUT


class GroupInput(msgspec.Struct, kw_only=True):
    """Body of /destroy_weights_update_group."""

    group_name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = GROUP


class FromGroupInput(UpdateInput, kw_only=True):
    """Body of /update_weights_from_distributed: what the trainer broadcasts in this order, by the names of a checkpoint."""

    names: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    dtypes: list[str]
    shapes: list[Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_DIMS)]]
    group_name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = GROUP


class ProfileInput(msgspec.Struct, kw_only=True):
    """Body of /start_profile. num_steps: stop by itself after so many forward steps."""

    output_dir: str | None = None
    start_step: int = 0
    num_steps: int | None = None
    activities: tuple[Literal["CPU", "GPU"], ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False
    profile_id: str = ""
    profile_prefix: str = ""


class ModelService:
    """Over a tokenizer manager. Answers are the scheduler's: success and a message."""

    def __init__(self, tm: TokenizerManager) -> None:
        self._tm = tm
        self._spooled: list[str] = []  # folders that the running weights are made of

    async def update_from_disk(self, query: FromDiskInput) -> ControlReply:
        """Load another checkpoint of the same architecture. The old weights stay if it does not do."""
        if not os.path.exists(query.model_path):
            raise RequestError(f"model_path: {query.model_path[:200]!r} is no folder or file here.", param="model_path")
        reply = await self._update(query, query.model_path, partial=False)
        if reply.success:
            self._drop_spooled()
        return reply

    async def update_from_tensors(self, query: UpdateInput, folder: str) -> ControlReply:
        """Load the tensors in ``folder``, which ``spool`` made and which is this object's from here on."""
        if query.load_format not in (None, "auto", "safetensors"):
            shutil.rmtree(folder, ignore_errors=True)
            raise RequestError("load_format must be safetensors, and so must the tensors.", param="load_format")
        reply = await self._update(query, folder, partial=True)
        if reply.success:
            self._spooled.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return reply

    async def init_group(self, query: InitGroupInput) -> ControlReply:
        """Join a trainer's group. Answers when all are there, or the time is over."""
        spec = GroupSpec(
            name=query.group_name,
            address=query.master_address,
            port=query.master_port,
            rank_offset=query.rank_offset,
            world_size=query.world_size,
            backend=query.backend,
            timeout=query.timeout,
        )
        return await self._tm.control(lambda call_id: WeightsGroupReq(call_id=call_id, name=spec.name, spec=spec))

    async def destroy_group(self, name: str) -> ControlReply:
        """Leave a group."""
        return await self._tm.control(lambda call_id: WeightsGroupReq(call_id=call_id, name=name))

    async def update_from_group(self, query: FromGroupInput) -> ControlReply:
        """Receive tensors from a trainer and put them in the place of those of the same names. All of them, or none if one does not
        do."""
        if query.load_format not in (None, "auto"):
            raise RequestError("load_format must be auto.", param="load_format")
        tensors = _announced(query)
        folder = str(self.spool().parent)
        reply = await self._update(query, folder, partial=True, group=query.group_name, tensors=tensors)
        if reply.success:
            self._spooled.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return reply

    async def _update(
        self, query: UpdateInput, path: str, *, partial: bool, group: str = "", tensors: Sequence[TensorSpec] = ()
    ) -> ControlReply:
        if query.load_format not in (None, "auto", "safetensors", "gguf"):
            raise RequestError("load_format must be auto, safetensors or gguf.", param="load_format")
        reply = await self._tm.control(
            lambda call_id: UpdateWeightsReq(
                call_id=call_id,
                path=path,
                load_format=query.load_format or "auto",
                partial=partial,
                flush_cache=query.flush_cache,
                abort_all=query.abort_all_requests,
                weight_version=query.weight_version,
                group=group,
                tensors=list(tensors),
            )
        )
        if reply.success and query.weight_version is not None:
            self._tm.set_weight_version(query.weight_version)
        return reply

    async def set_version(self, version: str, *, abort_all: bool) -> ControlReply:
        """Give the weights another name: no KV of the old one is found any more."""
        query = UpdateInput(flush_cache=False, abort_all_requests=abort_all, weight_version=version)
        return await self._update(query, "", partial=True)

    def spool(self) -> Path:
        """A fresh file for tensors, in the folder of the engine's sockets, which goes with the engine."""
        return Path(tempfile.mkdtemp(prefix="weights-", dir=self._tm.config.ipc.directory or None)) / TENSORS

    async def weights_by_name(self, name: str, truncate_size: int = 100) -> list[float]:
        """The first values of a tensor by its name in the checkpoint. Raises RequestError if there is none."""
        if not 0 < truncate_size <= MAX_TRUNCATE:
            raise RequestError(f"truncate_size must be in [1, {MAX_TRUNCATE}], got {truncate_size}.", param="truncate_size")
        reply = await self._tm.control(lambda call_id: ReadWeightReq(call_id=call_id, name=name, limit=truncate_size))
        if not reply.success:
            raise RequestError(reply.message, param="name")
        values: list[float] = reply.state["values"]
        return values

    async def memory(self, tags: list[Tag] | None, *, release: bool) -> ControlReply:
        """Give memory back, or take it again; tags None: all. There are no graphs to give back."""
        wanted = [tag for tag in (tags or ["kv_cache", "weights"]) if tag != "cuda_graph"]
        order = sorted(set(wanted), reverse=not release)  # weights before the KV when it is taken again
        return await self._tm.control(lambda call_id: MemoryReq(call_id=call_id, release=release, tags=list(order)))

    async def start_profile(self, query: ProfileInput) -> ControlReply:
        """Record forward steps with torch's profiler."""
        for field in ("profile_id", "profile_prefix"):
            value = getattr(query, field)
            if value and (len(value) > 100 or not value.replace("-", "").replace("_", "").replace(".", "").isalnum()):
                raise RequestError(f"{field} must be letters, digits, '.', '-' and '_'.", param=field)
        for field, value, least in (("start_step", query.start_step, 0), ("num_steps", query.num_steps, 1)):
            if value is not None and not least <= value < MAX_STEPS:
                raise RequestError(f"{field} must be in [{least}, {MAX_STEPS}), got {value}.", param=field)
        spec = ProfileSpec(
            folder=query.output_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR") or tempfile.gettempdir(),
            name=query.profile_id,
            prefix=query.profile_prefix,
            activities=query.activities,
            start_step=query.start_step,
            num_steps=query.num_steps,
            with_stack=query.with_stack,
            record_shapes=query.record_shapes,
        )
        return await self._tm.control(lambda call_id: ProfileReq(call_id=call_id, spec=spec))

    async def stop_profile(self) -> ControlReply:
        """The answer's message is the path of the trace."""
        return await self._tm.control(lambda call_id: ProfileReq(call_id=call_id))

    def _drop_spooled(self) -> None:
        for folder in self._spooled:
            shutil.rmtree(folder, ignore_errors=True)
        self._spooled.clear()


def _announced(query: FromGroupInput) -> list[TensorSpec]:
    """The tensors that a trainer is about to send. Raises RequestError for lists that do not fit each other."""
    for field in ("dtypes", "shapes"):
        if len(getattr(query, field)) != len(query.names):
            raise RequestError(f"{field} has {len(getattr(query, field))} entries for {len(query.names)} names.", param=field)
    if len(set(query.names)) < len(query.names):
        raise RequestError("names: the same one twice.", param="names")
    for shape in query.shapes:
        if math.prod(shape) > MAX_ELEMENTS:
            raise RequestError(f"shapes: a tensor may have {MAX_ELEMENTS} elements.", param="shapes")
    return [
        TensorSpec(name=name, dtype=dtype, shape=shape)
        for name, dtype, shape in zip(query.names, query.dtypes, query.shapes, strict=True)
    ]
