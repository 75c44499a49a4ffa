"""The classes that are run, and the version of transformers that has them."""

from __future__ import annotations


def classes() -> list[str]:
    """The classes that `AutoModelForCausalLM` of the installed transformers can make, in order."""
    from transformers.models.auto import modeling_auto

    return sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.lower)


def version() -> str:
    """Of the installed transformers."""
    import transformers

    return str(transformers.__version__)
