"""transformers' own server, which speaks OpenAI's protocol, with a compiled model: docs/serve.md.

    pip install "transformers[serving]"
    python examples/serve_with_transformers.py FOLDER
    curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"model": "FOLDER", "messages": [{"role": "user", "content": "Who are you?"}]}'
"""

import sys

# --- server
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

import attngraph


def server(folder: str):
    """transformers' application, in which the name of the folder is the compiled model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    compiled = attngraph.compile(AutoModelForCausalLM.from_pretrained(folder).eval())
    models, runs = ModelManager(device="cpu"), GenerationState()
    models.loaded_models[models.process_model_name(folder)] = TimedModel(compiled, -1, tokenizer)
    handlers = (
        kind(models, runs)
        for kind in (
            ChatCompletionHandler, CompletionHandler, ResponseHandler, TranscriptionHandler, SystemOneHandler,
        )
    )  # fmt: skip
    return build_server(models, *handlers, generation_state=runs)


# --- run
if __name__ == "__main__":
    import uvicorn

    uvicorn.run(server(sys.argv[1]))
