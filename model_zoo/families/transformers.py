"""Language models of transformers, from configurations small enough to run in milliseconds."""

from functools import partial
from typing import Any

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.sampling import Sampler, tokens

VOCABULARY = 128
LENGTH = 16


def _make(model: str, configuration: str, **options: Any) -> nn.Module:
    transformers = package("transformers")
    config = getattr(transformers, configuration)(vocab_size=VOCABULARY, use_cache=False, **options)
    made: nn.Module = getattr(transformers, model)(config)
    return made


def _entry(name: str, tags: str, sample: Sampler, model: str, configuration: str, **options: Any) -> Entry:
    make = partial(_make, model, configuration, **options)
    return Entry(
        f"transformers/{name}",
        frozenset({"language", "kwargs", "int-input", "data-dependent", "cheap", *tags.split()}),
        make,
        sample,
    )


ENTRIES = (
    _entry(
        "bert_tiny",
        "features draws",
        tokens(LENGTH, VOCABULARY),
        "BertModel",
        "BertConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    ),
    _entry(
        "gpt2_tiny",
        "generation draws tied",
        tokens(LENGTH, VOCABULARY),
        "GPT2LMHeadModel",
        "GPT2Config",
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    ),
    _entry(
        "llama_tiny",
        "generation",
        tokens(LENGTH, VOCABULARY),
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    ),
    # Its position bias is the attention mask: while that needs a gradient, SDPA takes the plain kernel.
    _entry(
        "t5_tiny",
        "generation draws tied grad-mode",
        tokens(LENGTH, VOCABULARY, decoder_length=10),
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
    ),
)
