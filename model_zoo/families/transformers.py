"""Models of transformers, from configurations small enough to run in milliseconds."""

from functools import partial
from typing import Any

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.process import quiet
from model_zoo.sampling import Sampler, call, floats, integers, tokens

VOCABULARY = 128
LENGTH = 16


def _make(model: str, configuration: str, **options: Any) -> nn.Module:
    transformers = package("transformers")
    with quiet("transformers"):  # it recommends kernels that are not installed
        config = getattr(transformers, configuration)(**options)
        made: nn.Module = getattr(transformers, model)(config)
    return made


def _entry(name: str, tags: str, sample: Sampler, model: str, configuration: str, **options: Any) -> Entry:
    make = partial(_make, model, configuration, **options)
    return Entry(f"transformers/{name}", frozenset({"kwargs", "cheap", *tags.split()}), make, sample)


def _language(
    name: str, tags: str, model: str, configuration: str, decoder_length: int | None = None, **options: Any
) -> Entry:
    sample = tokens(LENGTH, VOCABULARY, decoder_length)
    options = {"vocab_size": VOCABULARY, "use_cache": False, **options}
    return _entry(name, f"language int-input {tags}", sample, model, configuration, **options)


_CLIP = {
    "input_ids": integers(1, VOCABULARY, LENGTH),
    "pixel_values": floats(3, 32, 32),
    "attention_mask": lambda batch, generator: tokens(LENGTH, VOCABULARY)(batch, generator)[1]["attention_mask"],
}

ENTRIES = (
    # Its layers are one layer, called twice.
    _language(
        "albert_tiny",
        "features draws data-dependent",
        "AlbertModel",
        "AlbertConfig",
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    ),
    _language(
        "bert_tiny",
        "features draws data-dependent compiled",
        "BertModel",
        "BertConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    ),
    _language(
        "gpt2_tiny",
        "generation draws tied data-dependent compiled",
        "GPT2LMHeadModel",
        "GPT2Config",
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    ),
    _language(
        "llama_tiny",
        "generation data-dependent",
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    ),
    # A state-space model: without its CUDA kernels, a loop over time.
    _language(
        "mamba_tiny",
        "generation tied",
        "MambaForCausalLM",
        "MambaConfig",
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
    ),
    # A mixture of experts: which rows go where is data.
    _language(
        "mixtral_tiny",
        "generation data-dependent no-double",
        "MixtralForCausalLM",
        "MixtralConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        num_local_experts=4,
        max_position_embeddings=32,
    ),
    # Its position bias is the attention mask: while that needs a gradient, SDPA takes the plain kernel.
    _language(
        "t5_tiny",
        "generation draws tied grad-mode data-dependent",
        "T5ForConditionalGeneration",
        "T5Config",
        decoder_length=10,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
    ),
    # Images against texts: every row of one with every row of the other.
    _entry(
        "clip_tiny",
        "features int-input data-dependent rows-mixed",
        call(**_CLIP),
        "CLIPModel",
        "CLIPConfig",
        projection_dim=16,
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "eos_token_id": VOCABULARY - 1,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
    ),
    _entry(
        "segformer_tiny",
        "segmentation batchnorm draws",
        call(pixel_values=floats(3, 64, 64)),
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 32, 32],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=32,
    ),
    _entry(
        "vit_tiny",
        "classification draws",
        call(pixel_values=floats(3, 32, 32)),
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    ),
    # Without its masking of the spectrum and its dropping of layers, by which numpy and Python would draw.
    _entry(
        "wav2vec2_tiny",
        "audio features draws unused no-input-gradients",
        call(input_values=floats(640)),
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=[16, 16, 16],
        conv_stride=[5, 2, 2],
        conv_kernel=[10, 3, 2],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        layerdrop=0.0,
    ),
    _entry(
        "whisper_tiny",
        "audio generation draws int-input tied data-dependent",
        call(input_features=floats(8, 32), decoder_input_ids=integers(1, VOCABULARY, 10)),
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    ),
)
