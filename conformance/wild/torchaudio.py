"""Models of torchaudio."""

from __future__ import annotations

from functools import partial

import torch

from conformance.wild.making import entry
from model_zoo.sampling import call, dense, floats

_audio = partial(entry, "torchaudio.models")


def _lengths(frames: int):
    return lambda batch, generator: torch.full((batch,), frames)


ENTRIES = (
    _audio(
        "Conformer",
        call(floats(16, 8), _lengths(16)),
        "batchnorm draws int-input",
        input_dim=8,
        num_heads=2,
        ffn_dim=16,
        num_layers=2,
        depthwise_conv_kernel_size=5,
        dropout=0.1,
    ),
    _audio(
        "ConvTasNet",
        dense(1, 256),
        num_sources=2,
        enc_kernel_size=8,
        enc_num_feats=16,
        msk_kernel_size=3,
        msk_num_feats=8,
        msk_num_hidden_feats=16,
        msk_num_layers=2,
        msk_num_stacks=2,
    ),
    _audio("DeepSpeech", call(floats(1, 12, 8)), n_feature=8, n_hidden=16, n_class=5, dropout=0.1),
    _audio("Wav2Letter", dense(1, 4000), num_classes=5, input_type="waveform"),
    _audio(
        "WaveRNN",
        call(floats(1, 8), floats(1, 6, 4)),
        upsample_scales=[2, 2],
        n_classes=4,
        hop_length=4,
        n_res_block=1,
        n_rnn=8,
        n_fc=8,
        kernel_size=3,
        n_freq=6,
        n_hidden=8,
        n_output=8,
    ),
    _audio(
        "Emformer",
        call(floats(12, 8), _lengths(12)),
        "int-input",
        input_dim=8,
        num_heads=2,
        ffn_dim=16,
        num_layers=2,
        segment_length=4,
    ),
    _audio("hdemucs_low", call(floats(2, 4096)), sources=["a", "b"]),
    _audio(
        "wav2vec2_model",
        dense(800),
        "draws",
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(8, 10, 5), (8, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=16,
        encoder_projection_dropout=0.1,
        encoder_pos_conv_kernel=7,
        encoder_pos_conv_groups=2,
        encoder_num_layers=2,
        encoder_num_heads=2,
        encoder_attention_dropout=0.1,
        encoder_ff_interm_features=16,
        encoder_ff_interm_dropout=0.1,
        encoder_dropout=0.1,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=5,
    ),
)
