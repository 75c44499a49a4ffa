"""A checkpoint folder for the other examples, so that they download nothing: a tiny Llama of random weights,
whose answers are noise, and a tokenizer of single letters."""

import string

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tiny_checkpoint(folder: str) -> str:
    """Both as save_pretrained writes them; returns the folder."""
    words = ["<pad>", "<s>", "</s>", *string.printable[:96]]
    letters = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    ).save_pretrained(folder)  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
