"""Checkpoint folders for the other examples, so that they download nothing: a tiny Llama and a tiny BERT of
random weights, whose answers are noise, with tokenizers of single letters."""

import string

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


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


def tiny_encoder(folder: str) -> str:
    """The same of a BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *string.printable[:96]]
    letters = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {f"{word.strip('[]').lower()}_token": word for word in special}
    PreTrainedTokenizerFast(tokenizer_object=letters, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    return folder
