"""The classes of transformers that are exported, where the command names no others."""

DECODERS = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM",
    "OPTForCausalLM", "BloomForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM",
    "FalconForCausalLM", "MptForCausalLM", "StableLmForCausalLM", "CohereForCausalLM", "OlmoForCausalLM",
    "Olmo2ForCausalLM", "GraniteForCausalLM", "Starcoder2ForCausalLM", "GptOssForCausalLM",
)  # fmt: skip
ENCODERS = (
    "AlbertForMaskedLM", "BertForMaskedLM", "CamembertForMaskedLM", "ConvBertForMaskedLM",
    "Data2VecTextForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM", "ErnieForMaskedLM",
    "EsmForMaskedLM", "EuroBertForMaskedLM", "LayoutLMForMaskedLM", "MPNetForMaskedLM",
    "MegatronBertForMaskedLM", "MobileBertForMaskedLM", "ModernBertForMaskedLM", "NomicBertForMaskedLM",
    "RemBertForMaskedLM", "RoCBertForMaskedLM", "RoFormerForMaskedLM", "RobertaForMaskedLM",
    "RobertaPreLayerNormForMaskedLM", "XLMRobertaForMaskedLM", "XLMRobertaXLForMaskedLM", "XmodForMaskedLM",
    "DebertaV2ForMaskedLM",
)  # fmt: skip
