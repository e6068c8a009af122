"""A random Qwen3 with a whitespace tokenizer, as a Hugging Face folder: a start model that costs nothing to make."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 102


def make_start_model(folder: Path, *, hidden: int = 32, layers: int = 2, seed: int = 0) -> Path:
    """Tied embeddings, two query heads to a key-value head; heads of hidden / 4. Weights large enough to matter."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    wrapped.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    wrapped.save_pretrained(folder)
    return folder
