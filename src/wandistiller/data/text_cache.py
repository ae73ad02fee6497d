"""Text embeddings on disk: one ``NAME.safetensors`` an item, key ``embeddings``, and one for the empty caption.

Embeddings are kept without their padding; reading puts the zeros back. Each file says in its metadata which caption and which
text encoder it comes from, so that a stale one is found by its header. ``CacheFile`` and fingerprints are also used for the
cache of latents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from wandistiller.data.cache_files import CacheFile, Requirement, cache_path, fingerprint_weights, refuse_incomplete
from wandistiller.data.media_files import RESERVED_NAME
from wandistiller.data.sources import Source
from wandistiller.errors import CheckpointError
from wandistiller.models.text import pad_embeddings
from wandistiller.models.weight_files import open_weights

EMPTY_NAME = RESERVED_NAME
"""The name of the empty caption's entry, for dropping captions and for guidance."""

# What a configuration says about who saved it rather than about what is computed.
_PASSING_FIELDS = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "_diffusers_version")


class TextCache:
    """The embeddings of a data set's captions."""

    def __init__(self, folder: Path, *, encoder: str | None, dtype: str | None = None) -> None:
        """``encoder`` is what ``fingerprint_text_encoder`` gives; None for it or for ``dtype`` takes any."""
        self.folder = folder
        self._encoder = encoder
        self._dtype = dtype

    def file(self, name: str) -> CacheFile:
        """Return an item's file, whether or not it is there."""
        return CacheFile(cache_path(self.folder, name, ".safetensors"), "embeddings")

    def problem(self, name: str, caption: str) -> str | None:
        """Say why an item has to be encoded; None if it is up to date."""
        return self.file(name).problem(self._requirements(caption))

    def missing(self, source: Source) -> Iterator[tuple[int, str]]:
        """Yield the items to encode and why; -1 stands for the empty caption."""
        for index in range(-1, len(source)):
            problem = self.problem(*entry(source, index))
            if problem is not None:
                yield index, problem

    def check(self, source: Source) -> None:
        """Raise ``CheckpointError`` with the names of the first files that are missing or stale."""
        refuse_incomplete(self.folder, len(source) + 1, "text embeddings", [problem for _, problem in self.missing(source)])

    def read(self, name: str, width: int, caption: str | None = None) -> Tensor:
        """Return embeddings (512, ``width``) in float32, padded as the encoder's are; None for ``caption`` takes any."""
        file = self.file(name)
        stored, _ = file.read(self._requirements(caption))
        return pad_embeddings(stored, width, file.path, file.key)[0]

    def origin(self, name: str) -> str:
        """Return what tells embeddings apart from those of another caption or encoding, from the file's header alone."""
        return self.file(name).origin(("caption", "encoder", "dtype"))

    def write(self, name: str, caption: str, embeddings: Tensor, *, encoder_path: str) -> None:
        """Write the embeddings (512, width) of one caption, in their dtype."""
        metadata = {
            "caption": _hash(caption),
            "encoder": self._encoder or "",
            "encoder_path": encoder_path,
            "dtype": str(embeddings.dtype).removeprefix("torch."),
        }
        self.file(name).write(without_padding(embeddings), metadata)

    def _requirements(self, caption: str | None) -> list[Requirement]:
        wanted = (
            ("caption", None if caption is None else _hash(caption), "is of another caption"),
            ("encoder", self._encoder, "was made with another text encoder"),
            ("dtype", self._dtype, "was made in another precision"),
        )
        return [Requirement(field, value, otherwise) for field, value, otherwise in wanted if value is not None]


def without_padding(embeddings: Tensor) -> Tensor:
    """Return embeddings (512, width) without the zeros at their end, but for one token at least."""
    used = embeddings.any(dim=-1).nonzero()
    return embeddings[: int(used[-1]) + 1 if len(used) else 1]


def entry(source: Source, index: int) -> tuple[str, str]:
    """Return name and caption of an item; -1 stands for the empty caption."""
    return (EMPTY_NAME, "") if index < 0 else (source.name(index), source.caption(index))


def fingerprint_text_encoder(text_encoder: Path, tokenizer: Path) -> str:
    """Return what tells a text encoder and its tokenizer apart from all others, without reading all of the weights."""
    digest = hashlib.sha256()
    usual = (text_encoder / name for name in ("model.safetensors", "model.safetensors.index.json"))
    weights = open_weights(next((path for path in usual if path.is_file()), text_encoder))
    digest.update(_read_config(text_encoder / "config.json"))
    digest.update(fingerprint_weights(weights, {name: name for name in weights.entries}).encode())
    for file in sorted(tokenizer.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.suffix != ".md":
            digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_config(path: Path) -> bytes:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read.", why=str(error), fix="Copy or download it again.") from error
    return json.dumps({key: value for key, value in values.items() if key not in _PASSING_FIELDS}, sort_keys=True).encode()
