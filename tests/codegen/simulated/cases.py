"""The kernels on which the simulator itself is tested, each with its call and the answer in float64."""

from pathlib import Path

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from workshop.simulator import launch
from workshop.simulator.cases import Case

HERE = Path(__file__).parent
D = 64


def boxes(tensor, rows=64):
    dtype = gl.float32 if tensor.dtype is torch.float32 else gl.bfloat16
    block = [rows, tensor.shape[1]]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def random(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def run_forward(module, seed, tokens=256, keys=212, programs=1):
    q, k, v = random(tokens, D), random(keys, D), random(keys, D) + 1
    out = torch.full_like(q, float("nan"))
    given = {"q_desc": boxes(q), "k_desc": boxes(k), "v_desc": boxes(v), "o_desc": boxes(out)}
    given |= {"blocks": tokens // 128, "keys": keys, "RATE": 1.4426950408889634 / 8, "D": D, "STAGES": 2}
    launch(module.forward, (programs,), given, seed=seed, maxnreg=168)
    weights = torch.softmax(q.double() @ k.double().mT / 8, -1)
    torch.testing.assert_close(out.double(), weights @ v.double(), atol=1e-2, rtol=1e-2)


def run_backward(module, seed, tokens=192, keys=256):
    g, k, v, p = random(tokens, D), random(keys, D), random(keys, D), random(keys, tokens).float()
    dq, dv = torch.zeros(tokens, D), torch.full((keys, D), float("nan"))
    turns = torch.zeros(tokens // 64, dtype=torch.int32)
    given = {"g_desc": boxes(g), "k_desc": boxes(k), "v_desc": boxes(v), "dq_desc": boxes(dq), "turns": turns}
    given |= {"weights": p, "dv": dv, "tiles": tokens // 64, "D": D, "STAGES": 2}
    launch(module.backward, (keys // 128,), given, seed=seed, maxnreg=168, ordered=True)
    ds = p.double() * (v.double() @ g.double().mT)
    torch.testing.assert_close(dq.double(), ds.mT @ k.double(), atol=3, rtol=1e-2)
    torch.testing.assert_close(dv.double(), p.double() @ g.double(), atol=1e-3, rtol=1e-3)
    return dq


def run_forward_sm100(module, seed, tokens=256, keys=256):
    q, k, v = random(tokens, D), random(keys, D), random(keys, D) + 1
    out = torch.full((tokens, D), float("nan"))
    given = {"q_desc": boxes(q, 128), "k_desc": boxes(k), "v_desc": boxes(v), "out": out}
    given |= {"tiles": keys // 64, "RATE": 1.4426950408889634 / 8, "D": D, "STAGES": 2}
    launch(module.forward, (tokens // 128,), given, seed=seed)
    weights = torch.softmax(q.double() @ k.double().mT / 8, -1)
    torch.testing.assert_close(out.double(), weights @ v.double(), atol=1e-2, rtol=1e-2)


CASES = [
    Case("forward", (HERE / "forward.py").read_text(), run_forward),
    Case("forward of sm_100", (HERE / "forward_sm100.py").read_text(), run_forward_sm100,
         {r"later: mbarrier\.wait\(empty\..*":
          "past the copy of queries, which have a place of their own"}),
    Case("backward", (HERE / "backward.py").read_text(), run_backward,
         {r"- 1: dp = .*": "waits for more than it needs"}),
]  # fmt: skip
