"""What computes linears on this machine, in which dtype, and in which form it keeps their weights."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from ..layers.embedding import Embedding
from ..layers.kernels.cpu.library import Native, NotNative, native_kernels
from ..layers.kernels.ops import ops_of
from ..layers.linear import Linear
from ..layers.onednn import why_not_reordered
from ..layers.quantization import WeightFormat, weight_format
from ..layers.scaled_linear import DeviceFormat, device_format
from .dtype import choose_dtype
from .models.blocks import DecoderModel
from .step import RunnerConfig


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """``weights``: dtype of plain weights. ``compute``: dtype of activations, norms and whatever else is not a linear's weight.

    The native kernels compute in float32 whatever the weights are.
    """

    weights: torch.dtype
    compute: torch.dtype
    native: Native | NotNative
    form: WeightFormat | DeviceFormat | None
    keep_blocks: bool
    reorder: bool  # torch multiplies, by weights in oneDNN's order
    explain: dict[str, str]

    def packer(self, model: DecoderModel) -> Packer:
        """Packs the modules of a model as they are filled."""
        return Packer(model, self)


class Packer:
    """Called with each module of a model when it is filled."""

    def __init__(self, model: DecoderModel, plan: WeightPlan) -> None:
        self._head, self._plan = model.head, plan

    def __call__(self, module: nn.Module) -> None:
        plan = self._plan
        if isinstance(module, Linear):
            if plan.form is not None:
                module.pack(plan.form, head=module is self._head)
        elif isinstance(module, Embedding) and module is self._head:
            if plan.form is not None:
                module.pack(plan.form, plan.weights)
        else:
            return
        if plan.reorder:
            module.reorder()


def plan_weights(config: RunnerConfig, saved_dtype: str, device: torch.device) -> WeightPlan:
    """Decide for a config. Raises ValueError with one line for a combination that does not exist."""
    _check(config, device)
    native: Native | NotNative
    if device.type != "cpu":
        native = NotNative(f"off: the device is {device.type}")
    elif config.dtype == "float16":
        native = NotNative("off: there are none for float16")
    else:
        native = native_kernels()
    usable = native if isinstance(native, Native) else None
    dtype, why = choose_dtype(config.dtype, saved_dtype, device, native=usable is not None)
    form: WeightFormat | DeviceFormat | None
    if device.type == "cpu":
        form = weight_format(config.quantization, dtype, usable)
    else:
        form = device_format(config.quantization, ops_of(device.type), torch.cuda.get_device_capability(device))
    row_major = _why_row_major(config, dtype) if device.type == "cpu" and usable is None else None
    reorder = device.type == "cpu" and usable is None and row_major is None and not isinstance(form, DeviceFormat)
    explain = {"dtype": why, "cpu_kernels": native.why, "weights": _describe(config, form, row_major=row_major, reorder=reorder)}
    return WeightPlan(
        weights=dtype,
        compute=dtype if usable is None else torch.float32,
        native=native,
        form=form,
        keep_blocks=config.quantization == "gguf" and usable is not None,
        reorder=reorder,
        explain=explain,
    )


def _check(config: RunnerConfig, device: torch.device) -> None:
    if config.quantization is None:
        return
    if device.type == "cpu" and config.quantization == "fp8":
        raise ValueError("quantization fp8 is for CUDA devices, this is a CPU")
    if config.quantization == "gguf" and (config.load_format == "dummy" or not os.path.isfile(config.model_path)):
        raise ValueError(f"quantization gguf needs a GGUF file, {config.model_path} is none")


def _why_row_major(config: RunnerConfig, dtype: torch.dtype) -> str | None:
    """Why torch multiplies by weights as they are; None if by weights in oneDNN's order."""
    if config.enable_deterministic_inference:
        return "deterministic inference"
    if config.enable_torch_compile:
        return "torch.compile"
    return why_not_reordered(dtype)


def _describe(config: RunnerConfig, form: WeightFormat | DeviceFormat | None, *, row_major: str | None, reorder: bool) -> str:
    if isinstance(form, DeviceFormat):
        return f"quantization {config.quantization}, multiplied by {form.ops.products}"
    what = f"quantization {config.quantization}" if config.quantization else "no quantization"
    if form is not None and form.native is not None:
        if config.quantization == "gguf":
            return f"the file's blocks, repacked, and {form.linear.name} where there are none ({what})"
        return f"packed as {form.linear.name}, the head as {form.head.name} ({what})"
    order = "in oneDNN's order" if reorder else f"row-major ({row_major})" if row_major else "row-major"
    return f"{order}, multiplied by torch" if form is None else f"the values of {what}, {order}, multiplied by torch"
