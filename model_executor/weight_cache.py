"""Where packed weights are kept between starts: a folder of packed files in the user's cache folder, bounded in size.

The first start of a model packs its weights and writes them; every later one, and every other process that serves the same model
on the machine, maps the file. Nothing here can fail a start: what cannot be read, written or trusted is packed anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from ..layers.kernels.cpu.build import cache_folder as kernels_folder
from ..layers.kernels.cpu.library import Native
from ..layers.quantization import WeightFormat
from .loader import WeightsError, safetensors_files
from .models.blocks import DecoderModel
from .packed_file import Mapped, PackedFileError, size_of, write
from .shard import Shard
from .step import RunnerConfig
from .weight_form import WeightPlan

log = logging.getLogger(__name__)

SAMPLE = 1 << 20  # bytes of a checkpoint's beginning and end that are part of its identity
MIN_BYTES = 32 << 20  # of a checkpoint
SUFFIX, PARTIAL = ".packed", ".partial"
GIB = 1 << 30


def cache_folder() -> Path:
    """Beside the compiled kernels: packed in $BANYAN_CACHE, else in banyan in $XDG_CACHE_HOME or ~/.cache."""
    return kernels_folder().with_name("packed")


@dataclass(slots=True)
class Loaded:
    """A filled model. mapped: bytes of it that are a file's and not the process's own, so that the system calls them available."""

    model: DecoderModel
    mapped: int
    why: str


class WeightCache:
    """The file of one checkpoint in one form on one rank."""

    def __init__(self, config: RunnerConfig, shard: Shard, plan: WeightPlan) -> None:
        self._native = plan.native if isinstance(plan.native, Native) else None
        self._limit = config.weight_cache_bytes
        self.off = _reason_against(config, plan)
        self.key = "" if self.off or self._native is None else _key(config, shard, plan, self._native)
        self._file = cache_folder() / f"{hashlib.sha256(self.key.encode()).hexdigest()[:32]}{SUFFIX}"

    def load(self, make: Callable[[], DecoderModel], fill: Callable[[DecoderModel], None]) -> Loaded:
        """The model that was kept, else the empty one of ``make``, which ``fill`` fills and packs. Raises what these raise."""
        if self.off or self._native is None:
            return packed(make, fill, f"off: {self.off}")
        if kept := self._kept(make, self._native):
            return kept
        try:
            lock = self._lock()
        except OSError as error:
            log.warning("Packed weights cannot be kept in %s: %s", self._file.parent, error.strerror or error)
            return packed(make, fill, f"not kept: {self._file.parent} cannot be written ({error.strerror or error})")
        with lock:
            return self._kept(make, self._native) or self._pack_and_keep(make, fill, self._native)

    def _pack_and_keep(self, make: Callable[[], DecoderModel], fill: Callable[[DecoderModel], None], native: Native) -> Loaded:
        loaded = packed(make, fill, "packed now")
        nbytes = size_of(loaded.model)
        if nbytes > self._limit:
            loaded.why = f"not kept: {nbytes / GIB:.2f} GiB are above weight_cache_bytes"
            return loaded
        partial = self._file.with_suffix(PARTIAL)
        try:
            _make_room(self._file.parent, self._limit - nbytes)
            if shutil.disk_usage(self._file.parent).free < nbytes + GIB:
                loaded.why = f"not kept: less than {nbytes / GIB + 1:.2f} GiB are free in {self._file.parent}"
                return loaded
            write(partial, loaded.model, self.key)
            os.replace(partial, self._file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            log.warning("Packed weights cannot be kept in %s: %s", self._file.parent, error.strerror or error)
            loaded.why = f"not kept: {error.strerror or error}"
            return loaded
        return self._kept(make, native) or loaded

    def _kept(self, make: Callable[[], DecoderModel], native: Native) -> Loaded | None:
        """The model over the file, None where there is no file that is whole."""
        try:
            file = Mapped(self._file, self.key)
            model = make()
            file.fill(model, native)
            with suppress(OSError):  # a folder that others fill
                os.utime(self._file)
        except FileNotFoundError:
            return None
        except (PackedFileError, OSError) as error:
            log.warning("%s is not used, and packed anew: %s", self._file, error)
            return None
        return Loaded(model, file.nbytes, f"mapped from {self._file}, and shared by all processes that map it")

    def _lock(self) -> IO[str]:
        """One process packs, the others wait for it, until it closes the file or ends, however it ends. Raises OSError."""
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self._file.with_suffix(".lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock


def packed(make: Callable[[], DecoderModel], fill: Callable[[DecoderModel], None], why: str = "") -> Loaded:
    """A model in this process's own memory."""
    model = make()
    fill(model)
    return Loaded(model, 0, why)


def _reason_against(config: RunnerConfig, plan: WeightPlan) -> str:
    if not isinstance(plan.native, Native) or not isinstance(plan.form, WeightFormat):
        return "weights are not packed"
    if config.weight_cache_bytes <= 0:
        return "weight_cache_bytes is 0"
    if config.load_format == "dummy":
        return "dummy weights"
    is_small = sum(path.stat().st_size for path in _files(config.model_path)) < MIN_BYTES
    return "so small a model is packed as soon as mapped" if is_small else ""


def _key(config: RunnerConfig, shard: Shard, plan: WeightPlan, native: Native) -> str:
    """All that the bytes follow from. The kernels' folder names their sources, flags and compiler, hence the layout."""
    parts = {
        "kernels": native.path.parent.name,
        "form": [plan.form.linear.name, plan.form.head.name] if isinstance(plan.form, WeightFormat) else [],
        "weights": str(plan.weights),
        "compute": str(plan.compute),
        "keep_blocks": plan.keep_blocks,
        "model": msgspec.to_builtins(shard.local),
        "rank": [shard.spec.tp_rank, shard.spec.tp_size, shard.spec.pp_rank, shard.spec.pp_size],
        "files": [_identity(path) for path in _files(config.model_path)],
    }
    return msgspec.json.encode(parts, order="sorted").decode()


def _files(path: str) -> list[Path]:
    if os.path.isfile(path):
        return [Path(path)]
    try:
        return safetensors_files(path)[0]
    except WeightsError:  # the loader tells
        return []


def _identity(path: Path) -> list[str | int]:
    """Of a file: its name, size, time and a digest of its ends, among them the table of its tensors."""
    stat = path.stat()
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(SAMPLE))
        file.seek(max(stat.st_size - SAMPLE, 0))
        digest.update(file.read(SAMPLE))
    return [path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()]


def _make_room(folder: Path, limit: int) -> None:
    """Delete what was used the longest ago until the rest has at most ``limit`` bytes. Who maps a deleted file keeps it."""
    for partial in folder.glob(f"*{PARTIAL}"):
        _delete_abandoned(partial)
    files = sorted(((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob(f"*{SUFFIX}")), reverse=True)
    total = 0
    for _, size, path in files:
        total += size
        if total > limit:
            log.info("Packed weights that were not used for longest are deleted: %s", path)
            path.unlink(missing_ok=True)


def _delete_abandoned(partial: Path) -> None:
    """A partial file whose writer is gone: nobody holds its lock."""
    with partial.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        partial.unlink(missing_ok=True)
