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
    explain: dict[str, str]

    def packer(self, model: DecoderModel) -> Packer:
        """Packs the modules of a model as they are filled."""
        return Packer(model, self)


class Packer:
    """Called with each module of a model when it is filled."""

    def __init__(self, model: DecoderModel, plan: WeightPlan) -> None:
        self._head, self._plan = model.head, plan

    def __call__(self, module: nn.Module) -> None:
        form = self._plan.form
        if form is None:
            return
        if isinstance(module, Linear):
            module.pack(form, head=module is self._head)
        elif isinstance(module, Embedding) and module is self._head:
            module.pack(form, self._plan.weights)


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
    explain = {"dtype": why, "cpu_kernels": native.why, "weights": _describe(config, form)}
    return WeightPlan(
        weights=dtype,
        compute=dtype if usable is None else torch.float32,
        native=native,
        form=form,
        keep_blocks=config.quantization == "gguf" and usable is not None,
        explain=explain,
    )


def _check(config: RunnerConfig, device: torch.device) -> None:
    if config.quantization is None:
        return
    if device.type == "cpu" and config.quantization == "fp8":
        raise ValueError("quantization fp8 is for CUDA devices, this is a CPU")
    if config.quantization == "gguf" and (config.load_format == "dummy" or not os.path.isfile(config.model_path)):
        raise ValueError(f"quantization gguf needs a GGUF file, {config.model_path} is none")


def _describe(config: RunnerConfig, form: WeightFormat | DeviceFormat | None) -> str:
    if form is None:
        return "row-major, multiplied by torch"
    if isinstance(form, DeviceFormat):
        return f"quantization {config.quantization}, multiplied by {form.ops.products}"
    what = f"quantization {config.quantization}" if config.quantization else "no quantization"
    if form.native is None:
        return f"the values of {what}, row-major, multiplied by torch"
    if config.quantization == "gguf":
        return f"the file's blocks, repacked, and {form.linear.name} where there are none ({what})"
    return f"packed as {form.linear.name}, the head as {form.head.name} ({what})"
