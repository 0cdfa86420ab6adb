"""From options to running processes: resolve the model, start scheduler and detokenizer together, wait until both are ready."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from dataclasses import dataclass

import msgspec

from ..managers.config import SchedulerInfo, TokenizerManagerConfig
from ..managers.errors import StartError
from ..managers.ipc import IpcNames
from ..managers.processes.process_group import ChildSpec, ProcessGroup
from ..managers.ranks.layout import meeting_again, rank_configs, rank_name
from ..managers.tokenizer import Tokenizer
from .model_source import resolve_model
from .server_args import ServerArgs

log = logging.getLogger(__name__)

START_TIMEOUT = 1800.0  # seconds until all processes are ready; a big model loads for minutes


@dataclass(slots=True)
class Launched:
    """What runs now. The tokenizer manager is the caller's to make, on the caller's loop."""

    manager_config: TokenizerManagerConfig
    info: SchedulerInfo
    group: ProcessGroup
    ipc: IpcNames
    specs: list[ChildSpec]
    tokenizer: Tokenizer  # the main process's, loaded while the children started

    def restart(self, *, timeout: float = START_TIMEOUT) -> None:
        """Start the processes again, with a pool of the same size. Raises StartError; then all are stopped."""
        attempt = time.monotonic_ns()
        specs = [_same_size(spec, self.info, attempt) for spec in self.specs]
        self.group.restart(specs, timeout)

    def stop(self, timeout: float) -> None:
        """Give the processes ``timeout`` seconds to leave, end them, delete the sockets. Idempotent; no-op in a forked process."""
        if self.group.owned:
            self.group.stop(timeout)
            self.ipc.remove()


def launch(args: ServerArgs, *, timeout: float = START_TIMEOUT) -> Launched:
    """Start the engine's processes. Raises StartError, with a child's traceback in ``detail``, after cleaning up."""
    if args.use_ray and importlib.util.find_spec("ray") is None:
        raise StartError("--use-ray needs Ray: pip install 'banyan-engine[ray]'.")
    model_path = os.fspath(resolve_model(args.model_path, args.revision, args.download_dir).path)
    ipc = IpcNames.create()
    group = ProcessGroup()
    try:
        specs = [
            *_scheduler_specs(args, ipc, model_path),
            ChildSpec(name="detokenizer", config=args.detokenizer_config(ipc, model_path)),
        ]
        manager_config = args.tokenizer_manager_config(ipc, model_path)
        loaded: list[Tokenizer] = []
        payloads = group.start(specs, timeout, lambda: loaded.append(Tokenizer.load(manager_config.tokenizer_path)))
        info = _scheduler_info(payloads[specs[0].name])
        return Launched(manager_config, info, group, ipc, specs, loaded[0])
    except BaseException:
        group.stop(0)
        ipc.remove()
        raise


def _scheduler_specs(args: ServerArgs, ipc: IpcNames, model_path: str) -> list[ChildSpec]:
    """One process per rank of this machine, or a controller that starts the ranks of all replicas, here or in a Ray cluster."""
    if args.dp_size > 1 or args.use_ray:
        config = args.controller_config(ipc, model_path)
        return [ChildSpec(name="scheduler controller", kind="controller", config=config)]
    configs = rank_configs(args.scheduler_config(ipc, model_path), args.layout())
    return [ChildSpec(name=rank_name(config), kind="scheduler", config=config) for config in configs]


def _same_size(spec: ChildSpec, info: SchedulerInfo, attempt: int) -> ChildSpec:
    """What requests were checked against must hold for the next scheduler, however much memory is free by then."""
    if spec.role == "controller":
        inner = _same_size(ChildSpec(name="scheduler", config=spec.config.scheduler), info, attempt).config
        return msgspec.structs.replace(spec, config=msgspec.structs.replace(spec.config, scheduler=inner))
    if spec.role != "scheduler":
        return spec
    ranks = meeting_again(spec.config.runner.ranks, attempt)
    runner = msgspec.structs.replace(spec.config.runner, max_total_tokens=info.max_total_num_tokens, ranks=ranks)
    return msgspec.structs.replace(spec, config=msgspec.structs.replace(spec.config, runner=runner))


def _scheduler_info(payload: object) -> SchedulerInfo:
    try:
        return msgspec.convert(payload, SchedulerInfo)
    except msgspec.ValidationError as error:
        raise StartError(f"the scheduler reported something odd: {error}") from None
