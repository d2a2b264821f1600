"""What a conversion aims at: the runtime it is for, and how careful it is."""

from __future__ import annotations

from enum import Enum
from typing import Self

from amp_rewrite.errors import PolicyError


class _Choice(Enum):
    @classmethod
    def parse(cls, spelling: str) -> Self:
        """The member of that name, in any case, with "_" as good as "-"; PolicyError for anything else."""
        wanted = spelling.strip().lower().replace("_", "-")
        for member in cls:
            if member.value == wanted:
                return member
        legal = ", ".join(str(member.value) for member in cls)
        raise PolicyError(f"unknown {cls.__name__.lower()} {spelling!r}; use one of {legal}")


class Target(_Choice):
    """Who will run the model, and so what is legal.

    `ORT_CUDA`: onnxruntime's CUDA provider; an op is lowered only if a kernel runs its joint type assignment.
    `ONNX`: the schema alone decides. `TENSORRT`: the schema decides, and all float types of an op are one.
    """

    ORT_CUDA = "ort-cuda"
    ONNX = "onnx"
    TENSORRT = "tensorrt"


class Safety(_Choice):
    """Which rules protect numbers on top of the lists: this project's (`DEFAULT`), or none at all."""

    DEFAULT = "default"
    NONE = "none"
