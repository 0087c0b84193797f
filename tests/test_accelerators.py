"""Code that means CUDA itself keeps it: beside other accelerators, by its name, or tied to an NVIDIA package."""

import pytest

from tpumigrate.tables import TARGETS
from tpumigrate.testing import codes, fix_text

HEAD = "import torch\n"
KEPT = {
    "imported": HEAD + "import pycuda\ndef f(m):\n    return m.cuda()\n",
    "imported in the function": HEAD + "def f(m):\n    import tensorrt\n    return m.cuda()\n",
    "imported in the class": HEAD + "class A:\n    def g(self):\n        import tensorrt\n    def f(self, x):\n"
    "        return torch.ones(1, device='cuda')\n",
    "loaded if installed": HEAD + "try:\n    import tensorrt as trt\nexcept ImportError:\n    trt = None\n"
    "def f(m):\n    return trt.Builder(m.cuda())\n",
    "loaded by a string": HEAD + "trt, has_trt = optional_import('tensorrt')\n"
    "def f():\n    if has_trt and torch.cuda.is_available():\n        print(trt)\n",
    "loaded by importlib": HEAD + "import importlib\ntrt = importlib.import_module('torch_tensorrt.dynamo')\n"
    "def f(m):\n    return trt.compile(m.cuda())\n",
    "a stream's handle": HEAD + "class A:\n    def f(self, engine):\n        s = torch.cuda.Stream(device=0)\n"
    "        s.wait_stream(torch.cuda.current_stream())\n        engine.run(s.cuda_stream)\n",
    "a class by its name": HEAD + "class NormCUDA:\n    def f(self, x: torch.Tensor):\n        assert x.is_cuda\n",
    "an assertion beside others": HEAD + "def f(x):\n    assert x.is_cuda\n    return torch.xpu.is_available()\n",
    "a move beside others": HEAD + "def f(x, y):\n    print(torch.xpu.is_available())\n    if x.is_cuda:\n"
    "        y = y.cuda()\n    return y\n",
    "a kernel's device": HEAD + "op = torch.library.custom_op('a::b', print, mutates_args=(), device_types='cuda')\n"
    "@op.register_kernel('cuda')\ndef f(x):\n    return x\nop.register_autocast(device_type='cuda')\n"
    "torch.library.register_autocast('a::b', 'cuda', torch.float16)\n",
    "the device of what stays": HEAD + "s = torch.cuda.ExternalStream(7, device='cuda:0')\n",
}  # fmt: skip
# What only mentions such a package, or asks the same of something else, is migrated.
MIGRATED = {
    "beside what is loaded if installed": (
        HEAD + "try:\n    import tensorrt\nexcept ImportError:\n    pass\ndef f():\n    return torch.ones(1).cuda()\n",
        ".cuda()",
    ),
    "beside a function that uses it": (
        HEAD + "trt = optional_import('tensorrt')\ndef g():\n    return trt\n"
        "def f():\n    return torch.ones(1).cuda()\n",
        ".cuda()",
    ),
    "a text that is no import": (
        HEAD + "title = make('tensorrt')\ndef f():\n    return title, torch.ones(1).cuda()\n",
        ".cuda()",
    ),
    "an assertion": (HEAD + "def f(x):\n    assert x.is_cuda\n", "is_cuda"),
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KEPT)
def test_what_means_cuda_is_reported_and_stays(name: str, target: str) -> None:
    assert codes(KEPT[name], target)
    assert fix_text(KEPT[name], target) == KEPT[name]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MIGRATED)
def test_what_only_stands_beside_it_is_migrated(name: str, target: str) -> None:
    text, gone = MIGRATED[name]
    assert gone in text
    assert gone not in fix_text(text, target)


def test_a_device_goes_along_when_the_function_is_replaced() -> None:
    text = HEAD + 'print(torch.cuda.get_device_name("cuda:0"), torch.cuda.get_device_properties(device="cuda"))\n'
    fixed = 'print(torch.tpu.get_device_name("tpu"), torch.tpu.get_device_properties(device="tpu"))\n'
    assert fix_text(text, "torch_tpu") == HEAD + fixed
