"""Adapters of PEFT on a compiled model: training with accelerate, swapping, merging, weights of 4 bits.

    pip install peft accelerate bitsandbytes
    python examples/lora.py

The model is tiny and its weights are random; docs/train.md tells what is done.
"""

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import attngraph

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def train(model, ids, steps=3):
    """The losses of some steps. `model` may be compiled or not."""
    accelerator = Accelerator(cpu=True)
    weights = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model.train(), torch.optim.SGD(weights, lr=0.1))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- swap
def swap(model, ids):
    """The logits of the last token with each of two adapters, and the model with the first merged in."""
    adapted = get_peft_model(model, LORA, adapter_name="poems")
    adapted.add_adapter("letters", LORA)
    compiled = attngraph.compile(adapted, min_scores=0)  # calls as small as these too
    print("losses of poems", train(compiled, ids))
    compiled.eval()
    found = {}
    for name in ("poems", "letters", "poems"):
        adapted.set_adapter(name)  # the next call notices
        found[name] = compiled(input_ids=ids).logits[:, -1]
    decoder = attngraph.compile(adapted, cache=True)  # with the adapter that is active
    print("poems continue", decoder.generate(ids, 5)[:, ids.shape[1] :].tolist())
    return found, adapted.merge_and_unload()


# --- 4 bits
def four_bits(folder):
    """A model whose weights are kept in 4 bits, with an adapter."""
    kept = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, quantization_config=kept), LORA)


# --- run
if __name__ == "__main__":
    import tempfile

    from tiny_checkpoint import tiny_checkpoint

    torch.manual_seed(0)
    folder, ids = tiny_checkpoint(tempfile.mkdtemp()), torch.randint(3, 90, (2, 12))
    _, merged = swap(AutoModelForCausalLM.from_pretrained(folder), ids)
    compiled = attngraph.compile(merged)
    continued = compiled.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    print("merged continues", continued[:, ids.shape[1] :].tolist())
    print("losses of 4 bits", train(attngraph.compile(four_bits(folder), min_scores=0), ids))
