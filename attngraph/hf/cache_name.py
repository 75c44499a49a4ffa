"""What transformers calls the cache among the arguments and results of a model: `cache` from 5.24 on,
before that `past_key_values`."""

from __future__ import annotations

import dataclasses

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")
"""All names that it has had, the newest first."""

CACHE = next(n for n in CACHE_NAMES if n in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)})
"""The name in the installed transformers."""
