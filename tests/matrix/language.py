"""Networks of transformers, for text and pictures, from tiny configurations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.matrix.entries import CLASSES, Entry, picture, text
from torch import nn

_TINY = {
    "num_labels": CLASSES, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
TINY_TEXT = _TINY | {"vocab_size": 40, "max_position_embeddings": 32}
_DECODER = TINY_TEXT | {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 2,
}  # fmt: skip
_TINY_PICTURE = _TINY | {"image_size": 32, "patch_size": 8}
_STAGES = {"num_labels": CLASSES, "depths": [1, 1], "hidden_sizes": [8, 16]}

# Name, class of the model, class of its configuration, what the configuration says.
_TEXT: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("BERT", "BertForSequenceClassification", "BertConfig", TINY_TEXT),
    ("BERT (tokens)", "BertForTokenClassification", "BertConfig", TINY_TEXT),
    ("MiniLM", "BertForSequenceClassification", "BertConfig", TINY_TEXT | {"hidden_size": 24}),
    ("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig", {
        "num_labels": CLASSES, "vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2,
        "hidden_dim": 32, "max_position_embeddings": 32,
    }),
    ("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", TINY_TEXT),
    ("ELECTRA", "ElectraForSequenceClassification", "ElectraConfig", TINY_TEXT | {
        "embedding_size": 16,
    }),
    ("ALBERT", "AlbertForSequenceClassification", "AlbertConfig", TINY_TEXT | {
        "embedding_size": 8,
    }),
    ("MPNet", "MPNetForSequenceClassification", "MPNetConfig", TINY_TEXT),
    ("DeBERTa-v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", TINY_TEXT | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
        "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "share_att_key": True,
    }),
    ("ModernBERT", "ModernBertForSequenceClassification", "ModernBertConfig", TINY_TEXT | {
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2, "local_attention": 8,
    }),
    ("Llama", "LlamaForSequenceClassification", "LlamaConfig", _DECODER),
    ("Mistral", "MistralForSequenceClassification", "MistralConfig", _DECODER),
    ("Qwen3", "Qwen3ForSequenceClassification", "Qwen3Config", _DECODER | {"head_dim": 8}),
    ("Gemma2", "Gemma2ForSequenceClassification", "Gemma2Config", _DECODER | {"head_dim": 8}),
    ("GPT-2", "GPT2ForSequenceClassification", "GPT2Config", {
        "num_labels": CLASSES, "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2,
        "n_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }),
)  # fmt: skip
_IMAGE: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("ViT", "ViTForImageClassification", "ViTConfig", _TINY_PICTURE),
    ("DeiT (teacher)", "DeiTForImageClassificationWithTeacher", "DeiTConfig", _TINY_PICTURE),
    ("BEiT", "BeitForImageClassification", "BeitConfig", _TINY_PICTURE | {"vocab_size": 40}),
    ("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", _TINY_PICTURE),
    ("ConvNext", "ConvNextForImageClassification", "ConvNextConfig", _STAGES | {
        "num_stages": 2,
    }),
    ("ConvNextV2", "ConvNextV2ForImageClassification", "ConvNextV2Config", _STAGES | {
        "num_stages": 2,
    }),
    ("ResNet", "ResNetForImageClassification", "ResNetConfig", _STAGES | {
        "embedding_size": 8, "layer_type": "basic",
    }),
    ("Swin", "SwinForImageClassification", "SwinConfig", {
        "num_labels": CLASSES, "image_size": 32, "patch_size": 4, "embed_dim": 16,
        "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    }),
    ("SegFormer", "SegformerForSemanticSegmentation", "SegformerConfig", _STAGES | {
        "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "sr_ratios": [2, 1],
        "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    }),
)  # fmt: skip
_TRANSFORMERS_CORE = {"BERT", "Llama"}
_HEADS: dict[str, dict[str, Any]] = {
    "SegFormer": {"head_name": "decode_head.classifier"},
    "DeiT (teacher)": {"head_name": ["cls_classifier", "distillation_classifier"]},
}


def tiny_transformer(model: str, config: str, settings: Mapping[str, Any]) -> nn.Module:
    import transformers

    network: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return network


def transformers_networks() -> list[Entry]:
    rows = [(row, text()) for row in _TEXT] + [(row, picture(32, "pixel_values")) for row in _IMAGE]
    return [
        Entry(
            name, "transformers", partial(tiny_transformer, model, config, settings), example,
            options=_HEADS.get(name, {}), class_dim=-1 if "Token" in model else 1,
            core=name in _TRANSFORMERS_CORE,
        )
        for (name, model, config, settings), example in rows
    ]  # fmt: skip
