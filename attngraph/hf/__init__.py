"""attngraph in transformers: an attention implementation for its models, and decoders for its `generate`.

    attngraph.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attngraph")

    decoder = attngraph.compile(model, cache=True)
    attngraph.hf.generation_model(decoder).generate(ids, max_new_tokens=64)

This is the only part of attngraph that imports transformers (5.0 or newer). `fused.py` is the attention, and
describes masks for it, `generation.py` wraps a decoder as a transformers model, `stepwise.py`
takes the steps of transformers' own cache.
"""

_WANTED = "attngraph.hf needs transformers 5.0 or newer, found {}: pip install 'transformers>=5'."
try:
    import transformers
except ImportError as problem:
    raise ImportError(_WANTED.format("none")) from problem
if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(_WANTED.format(transformers.__version__))

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

import attngraph.codegen  # noqa: E402, F401  registers our ops and kernels
from attngraph.hf.fused import NAME, attention, make_mask  # noqa: E402
from attngraph.hf.generation import CACHE, GenerationModel, State, generation_model  # noqa: E402
from attngraph.hf.stepwise import Stepwise, stepwise  # noqa: E402
from attngraph.meaning.masks import flops as flops  # noqa: E402  registers the formulas of their operations

__all__ = [
    "CACHE", "GenerationModel", "State", "Stepwise", "attention", "generation_model", "register", "stepwise",
]  # fmt: skip


def register() -> None:
    """Register `attn_implementation="attngraph"` with transformers: the attention, and its mask function,
    without which padding would be ignored. Registering again has no effect."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
