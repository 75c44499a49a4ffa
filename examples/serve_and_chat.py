"""From a checkpoint folder of transformers to text: a pipeline, a chat, streams, a batch, many requests.

    python examples/serve_and_chat.py [FOLDER]

Without a FOLDER it makes a tiny model of random weights, whose answers are noise. docs/serve.md explains it.
"""

import asyncio
import sys
import tempfile
from threading import Thread

from tiny_checkpoint import tiny_checkpoint
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModelForCausalLM,
    AutoTokenizer,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import attngraph

folder = sys.argv[1] if sys.argv[1:] else tiny_checkpoint(tempfile.mkdtemp())

# --- load
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder).eval()
compiled = attngraph.compile(model)
end = tokenizer.eos_token_id

# --- pipeline
write = pipeline("text-generation", model=compiled, tokenizer=tokenizer)
print(write("Once upon a time", max_new_tokens=10, do_sample=False))
print(write(["Once upon", "There was"], max_new_tokens=10, do_sample=False, batch_size=2))
print(write([{"role": "user", "content": "Who are you?"}], max_new_tokens=10, do_sample=False))

# --- chat
decoder = attngraph.compile(model, cache=True)
messages, state, said = [], None, ""
for question in ("Who are you?", "And who am I?"):
    messages.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not text.startswith(said):  # a template that leaves out what earlier turns thought, say
        state, said = None, ""
    turn = tokenizer(text[len(said) :], add_special_tokens=False, return_tensors="pt")["input_ids"]
    found = decoder.generate(
        turn, 20, state=state, eos_token_id=end, stop_strings=["\nuser:"], tokenizer=tokenizer,
        return_dict_in_generate=True,
    )  # fmt: skip
    answer = tokenizer.decode(found.sequences[0, turn.shape[1] :])
    state, said = found.state, text + answer
    messages.append({"role": "assistant", "content": answer.removesuffix(tokenizer.eos_token)})
    print(f"{messages[-1]['content']!r}: {turn.shape[1]} tokens read, {state.lengths[0]} in the state")

# --- stream
prompt = tokenizer("Once upon a time", return_tensors="pt")
compiled.generate(**prompt, max_new_tokens=10, do_sample=False, streamer=TextStreamer(tokenizer))

# --- stream in a loop
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
options = {**prompt, "max_new_tokens": 10, "do_sample": False, "streamer": streamer}
Thread(target=compiled.generate, kwargs=options).start()
for piece in streamer:
    print(piece, end="|", flush=True)
print()


# --- stream without blocking
async def streamed(text: str) -> str:
    streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
    prompt = tokenizer(text, return_tensors="pt")
    options = {**prompt, "max_new_tokens": 10, "do_sample": False, "streamer": streamer}
    Thread(target=compiled.generate, kwargs=options).start()
    return "".join([piece async for piece in streamer])


print(asyncio.run(streamed("Once upon a time")))

# --- batch
batch = tokenizer(["Once upon a time", "There"], return_tensors="pt", padding=True)
tokens = decoder.generate(**batch, max_new_tokens=10, eos_token_id=end, pad_token_id=0)
texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
print(texts)

# --- many requests
engine = attngraph.Engine(decoder, max_batch=8)


async def reply(text: str) -> str:
    ids = tokenizer(text)["input_ids"]
    request = engine.submit(ids, max_new_tokens=10, eos_token_id=end)
    return tokenizer.decode([*ids, *[token async for token in request]], skip_special_tokens=True)


async def replies(*texts: str) -> list[str]:
    return await asyncio.gather(*map(reply, texts))


served = asyncio.run(replies("Once upon a time", "There"))
print(served)
