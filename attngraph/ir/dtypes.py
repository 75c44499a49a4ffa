"""The dtypes, a row each: how graphs, C and Triton name them, and in which kind scores compute with them.

A name that is empty is missing there: no such elements are read in that place. 8- and 16-bit integers have no
kind, because PyTorch's arithmetic wraps around, and kernels compute in wider types.
"""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class DType:
    """One dtype.

    Attributes:
        short: in the text of graphs.
        c, word: the C type of an element, and its name in `codegen/cpu/c/elements.h`.
        kind: in which elements that scores read are computed with, as `codegen/scalar/form.py` has them.
        triton: in the type of a pointer.
    """

    torch: torch.dtype
    short: str = ""
    c: str = ""
    word: str = ""
    kind: str = ""
    triton: str = ""

    @property
    def name(self) -> str:
        """As `torch.<name>`."""
        return str(self.torch).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        return self.torch.itemsize

    @property
    def largest(self) -> float:
        """The largest finite number."""
        limits = torch.finfo if self.torch.is_floating_point else torch.iinfo
        return float(limits(self.torch).max)


DTYPES = {row.torch: row for row in (
    DType(torch.float32, "f32", "float", "FLOAT", "float", "fp32"),
    DType(torch.float64, "f64", kind="double", triton="fp64"),
    DType(torch.float16, "f16", "_Float16", "F16", "float", "fp16"),
    DType(torch.bfloat16, "bf16", "uint16_t", "BF16", "float", "bf16"),
    DType(torch.int64, "i64", "int64_t", kind="long", triton="i64"),
    DType(torch.int32, "i32", "int32_t", "INT32", "int", "i32"),
    DType(torch.int16, "i16"),
    DType(torch.int8, "i8", "int8_t", "INT8", triton="i8"),
    DType(torch.uint8, "u8", "uint8_t", "UINT8", triton="u8"),
    DType(torch.float8_e4m3fn, "", "uint8_t", "F8", triton="u8"),
    DType(torch.bool, "bool", "uint8_t", kind="bool", triton="u8"),
    DType(torch.complex64, "c64"),
    DType(torch.complex128, "c128"),
)}  # fmt: skip
NAMED = {row.name: row for row in DTYPES.values()}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Of queries, keys, values and numbers of tokens, as kernels are written for them."""
SCALED = (torch.int8, torch.float8_e4m3fn)
"""Of 8 bits: a cache may keep numbers in them, with a scale for each vector."""
