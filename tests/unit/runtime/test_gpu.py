"""What is asked of the driver, with a driver that is made up."""

from __future__ import annotations

import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.runtime.gpu import (
    Gpu,
    Hardware,
    hardware,
    refusal,
)
from support.fake_driver import H200, P100, Driver, Shelf

# -- GPUs ----------------------------------------------------------------------------------------------


def test_gpus_have_name_capability_and_memory_and_the_driver_its_cuda() -> None:
    assert hardware(Shelf(Driver(H200, P100))) == Hardware((H200, P100), (13, 2), None)


@pytest.mark.parametrize(
    ("shelf", "found"),
    [
        (Shelf(), Hardware(absence="no NVIDIA driver is installed here: libcuda.so.1 cannot be loaded")),
        (
            Shelf(Driver(starts=100)),
            Hardware(
                (),
                (13, 2),
                "the NVIDIA driver sees no GPU; look at CUDA_VISIBLE_DEVICES, or give the container one",
            ),
        ),
        (
            Shelf(Driver(version=12080)),
            Hardware(
                (),
                (12, 8),
                "the NVIDIA driver sees no GPU; look at CUDA_VISIBLE_DEVICES, or give the container one",
            ),
        ),
        (
            Shelf(Driver(starts=999)),
            Hardware((), (13, 2), "the NVIDIA driver does not start: cuInit gives 999"),
        ),
    ],
)
def test_that_there_is_no_gpu_has_a_reason(shelf: Shelf, found: Hardware) -> None:
    assert hardware(shelf) == found


# -- what they are good for ----------------------------------------------------------------------------


def test_float16_is_fast_from_7_0_on_and_bfloat16_from_8_0_on() -> None:
    gpus = [Gpu("G", capability) for capability in ((6, 9), (7, 0), (7, 5), (8, 0), (10, 0))]
    for to, slow in ((DType.FLOAT16, 1), (DType.BFLOAT16, 3)):
        found = [refusal(Hardware((gpu,)), to) is None for gpu in gpus]
        assert found == [False] * slow + [True] * (5 - slow)


def test_a_refusal_names_the_gpu_that_would_be_used() -> None:
    machine = Hardware((H200, P100))
    assert refusal(machine, DType.FLOAT16, 1) == (
        "float16 is fast from compute capability 7.0 on, and this GPU has less: Tesla P100, compute capability 6.0"
    )
    assert refusal(machine, DType.FLOAT16, 0) is None
    assert refusal(machine, DType.FLOAT16, 2) == "there is no GPU 2, only 2"
    assert refusal(Hardware(absence="nobody here"), DType.BFLOAT16) == (
        "nobody here; on a CPU bfloat16 is slower, not faster"
    )
