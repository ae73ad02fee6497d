import pytest
import torch

from wandistiller.errors import UsageError
from wandistiller.models.devices import available_devices, find_device, find_dtype


def test_the_cpu_is_always_there():
    assert available_devices()[-1] == torch.device("cpu")
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto") == available_devices()[0]


@pytest.mark.parametrize("name", ["cuda:99", "nonsense", "xpu"])
def test_a_device_that_is_not_there(name):
    with pytest.raises(UsageError, match="--device"):
        find_device(name)


def test_precision_by_name():
    assert find_dtype("auto", torch.device("cpu")) == torch.float32
    assert find_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert find_dtype("float16", torch.device("cpu")) == torch.float16
