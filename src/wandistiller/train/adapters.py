"""LoRA adapters on a model that is still empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from wandistiller.errors import UsageError
from wandistiller.memory.layout import bind
from wandistiller.memory.placement import Subject


def check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise ``UsageError`` for a name that no layer of a model, which may be empty, ends in."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise UsageError(f"--lora-targets {target}: the model has no such layer.", fix="to_q, to_k and to_v are usual.")


def add_adapters(subject: Subject, *, rank: int, alpha: int, targets: Sequence[str], seed: int) -> Subject:
    """Add adapters, which are real while the model is still empty, in the precision of the layers that they belong to.

    In float32 beside weights in 16 bits, each layer would compute on a float32 copy of its input: a sixth slower, and an
    eighth more memory at video length. Small updates are the optimiser's matter, which has its own copies in float32.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = subject.model
    model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets)))
    dtypes = {name: module.weight.dtype for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            values = torch.zeros(parameter.shape)
            if ".lora_A." in name:  # as peft does it: uniform up to 1 / sqrt(inputs), and zeros for the second factor
                values.uniform_(-1, 1, generator=generator).div_(parameter.shape[1] ** 0.5)
            bind(parameter, values.to(dtypes[name.split(".lora_")[0]]))
    assert subject.read is not None and subject.locate is not None
    read, locate = subject.read, subject.locate
    # peft puts the layer itself one level down.
    return replace(
        subject,
        read=lambda name: read(name.replace(".base_layer.", ".")),
        locate=lambda name: None if ".lora_" in name else locate(name.replace(".base_layer.", ".")),
    )
