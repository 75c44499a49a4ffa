"""SFTTrainer and GRPOTrainer of TRL on a model whose attention is fused: docs/train.md.

    pip install trl
    python examples/train_with_trl.py

The model is tiny and its weights are random.
"""

import tempfile

from datasets import Dataset
from tiny_checkpoint import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import attngraph

OPTIONS = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no",
    "logging_steps": 1, "disable_tqdm": True, "seed": 0, "output_dir": tempfile.gettempdir(),
}  # fmt: skip


# --- backbone
def with_fused_attention(model):
    """A causal model of transformers whose part below the logits is compiled: TRL's trainers call that."""
    setattr(model, model.base_model_prefix, attngraph.compile(model.base_model, min_scores=0))
    return model


# --- sft
def sft(model, tokenizer):
    """The losses of two steps on texts."""
    texts = Dataset.from_list([{"text": "Once upon a time"}, {"text": "there was a model"}] * 2)
    options = SFTConfig(max_steps=2, per_device_train_batch_size=2, **OPTIONS)
    trainer = SFTTrainer(model, args=options, train_dataset=texts, processing_class=tokenizer)
    trainer.train()
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


# --- grpo
def grpo(model, tokenizer):
    """What was rewarded in one step of sampling and training: texts with many q's."""
    prompts = Dataset.from_list([{"prompt": "Once upon"}, {"prompt": "there"}] * 2)
    options = GRPOConfig(
        max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=8, **OPTIONS
    )
    trainer = GRPOTrainer(
        model, lambda completions, **_: [float(text.count("q")) for text in completions],
        args=options, train_dataset=prompts, processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return [(step["reward"], step["grad_norm"]) for step in trainer.state.log_history if "reward" in step]


# --- run
if __name__ == "__main__":
    folder = tiny_checkpoint(tempfile.mkdtemp())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for train in (sft, grpo):
        model = with_fused_attention(AutoModelForCausalLM.from_pretrained(folder))
        print(train.__name__, train(model, tokenizer))
        print(f"{len(model.base_model.report.attention)} attentions fused")
