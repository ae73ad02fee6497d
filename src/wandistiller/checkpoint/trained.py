"""What a training leaves behind: a diffusers folder with the new weights, or LoRA files; each verified by reading it again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from wandistiller.checkpoint.formats import into_shards, write_folder
from wandistiller.checkpoint.proof import write_and_prove
from wandistiller.distributed.pieces import whole
from wandistiller.errors import OutputError
from wandistiller.files import complete_or_absent
from wandistiller.models.channel_adapter import ChannelAdapter
from wandistiller.models.pipeline import Pipeline
from wandistiller.models.stored import StoredModel, inspect_checkpoint
from wandistiller.models.student_facts import write_learnt_guidance, write_text_limit
from wandistiller.models.text_padding import TEXT_TOKENS
from wandistiller.models.transformer_keys import to_original
from wandistiller.models.weight_files import WEIGHT_SUFFIXES, Planned, in_file_order, write_safetensors

_LINKED_BYTES = 1 << 20


def write_pipeline(
    target: Path,
    pipeline: Pipeline,
    replaced: Mapping[str, Callable[[Path], None]],
    vae: StoredModel | None = None,
    complete: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a diffusers pipeline in which some parts are new; the others are copied, their large weights linked where possible.

    ``vae`` is the one that the new parts' latents are of, where that is not the pipeline's own; it may be of any dialect.
    ``complete`` may change the folder before it gets its name.
    """
    if vae is not None:
        given = vae
        replaced = {**replaced, "vae": lambda path: write_and_prove(given, path, "diffusers")}
    with complete_or_absent(target) as partial:
        partial.mkdir(parents=True)
        for name, path in pipeline.parts.items():
            if name not in replaced:
                shutil.copytree(path, partial / name, copy_function=_link_or_copy)
        for name, write in replaced.items():
            write(partial / name)
        shutil.copyfile(pipeline.folder / "model_index.json", partial / "model_index.json")
        if vae is not None:  # the pipeline itself may have none
            _change_index(partial, {"vae": ["diffusers", vae.architecture.model_class.__name__]})
        complete(partial)


def _change_index(folder: Path, changes: Mapping[str, object]) -> None:
    index = folder / "model_index.json"
    values = {**json.loads(index.read_text(encoding="utf-8")), **changes}
    index.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_student_pipeline(
    target: Path,
    pipeline: Pipeline,
    write: Callable[[Path], None],
    *,
    vae: StoredModel | None = None,
    adapter: ChannelAdapter | None = None,
    max_text_tokens: int = TEXT_TOKENS,
    learnt_guidance: float | None = None,
) -> None:
    """Write a pipeline whose one transformer is new; where the old one had two experts, the new one has none.

    ``vae`` is as in ``write_pipeline``. ``adapter`` goes with a transformer whose latents have other channels than the VAE's,
    ``max_text_tokens`` with one that knows the beginning of captions alone, ``learnt_guidance`` with one that needs none more.
    """

    def complete(folder: Path) -> None:
        write_text_limit(folder, max_text_tokens)
        write_learnt_guidance(folder, learnt_guidance)
        if adapter is not None:
            adapter.save(folder)
        if "transformer_2" in pipeline.parts:
            _change_index(folder, {"transformer_2": [None, None], "boundary_ratio": None})

    replaced = replace(pipeline, parts={name: path for name, path in pipeline.parts.items() if name != "transformer_2"})
    write_pipeline(target, replaced, {"transformer": write}, vae, complete)


def write_model(folder: Path, model: nn.Module) -> None:
    """Save a diffusers model and read it back; of one that is spread over ranks no device has more than a tensor at a time.

    The other ranks have to call ``follow_model`` at the same time.
    """
    tensors = model.state_dict()
    planned = _plan_model(tensors)
    if _is_spread(tensors):
        own = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
        config = {key: value for key, value in model.config.items() if not key.startswith("_")}
        write_folder(folder, own.__name__, config, planned)
    else:
        model.save_pretrained(folder)
    stored = inspect_checkpoint(folder)
    for tensor in planned:
        value = tensor.load()
        if tensor.name in stored.names and not torch.equal(stored.read(tensor.name), value):
            raise OutputError(f"{folder}: '{tensor.name}' came back changed.", fix="Check the disk.")


def follow_model(model: nn.Module) -> None:
    """Take part in bringing a model together that another rank writes; nothing happens if each has all of it."""
    tensors = model.state_dict()
    if not _is_spread(tensors):
        return
    planned = _plan_model(tensors)
    for tensor in (*(each for shard in into_shards(planned) for each in in_file_order(shard)), *planned):
        tensor.load()


def _is_spread(tensors: Mapping[str, Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def _plan_model(tensors: Mapping[str, Tensor]) -> list[Planned]:
    def loads(tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: whole(tensor.detach()).cpu()

    return [Planned(name, each.dtype, tuple(each.shape), loads(each)) for name, each in tensors.items()]


def write_lora(folder: Path, adapters: Mapping[str, Tensor], *, alpha: float, rank: int) -> None:
    """Write LoRA weights for diffusers and, under the original names, for ComfyUI.

    ``adapters`` are peft's, such as ``blocks.0.attn1.to_q.lora_A.weight``. The scale ``alpha / rank`` is multiplied into the
    second factor, so that both readers give the same whatever they assume.
    """
    scaled = {
        name: (tensor * (alpha / rank) if ".lora_B." in name else tensor).detach().cpu().contiguous()
        for name, tensor in adapters.items()
    }
    with complete_or_absent(folder) as partial:
        partial.mkdir(parents=True)
        for file, named in (
            ("pytorch_lora_weights.safetensors", {f"transformer.{name}": value for name, value in scaled.items()}),
            ("comfyui_lora.safetensors", {_comfyui_name(name): value for name, value in scaled.items()}),
        ):
            write_safetensors(partial / file, [_planned(name, value) for name, value in named.items()], {})
            found = load_file(partial / file)
            if found.keys() != named.keys() or any(not torch.equal(found[name], value) for name, value in named.items()):
                raise OutputError(f"{partial / file} came back changed.", fix="Check the disk.")


def _planned(name: str, tensor: Tensor) -> Planned:
    return Planned(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def _comfyui_name(name: str) -> str:
    module, _, rest = name.partition(".lora_")
    original = to_original(f"{module}.weight")
    assert original is not None, module  # adapters sit on the layers of the model's own keys
    return f"diffusion_model.{original.removesuffix('.weight')}.lora_{rest}"


def _link_or_copy(source: str, target: str) -> str:
    """Link to large weights, which takes no room, and copy the rest; follow the links of a hub's cache.

    What is linked is one file with two names. Configurations are edited in place, and the model that this one was made of must
    not change with them.
    """
    file = Path(source).resolve()
    if file.stat().st_size >= _LINKED_BYTES and Path(source).suffix in WEIGHT_SUFFIXES:
        with suppress(OSError):  # another file system, or one that has no links
            os.link(file, target)
            return target
    shutil.copy2(file, target)
    return target
