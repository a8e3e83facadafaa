"""The demo's text-to-image pipeline: diffusers' real Flux classes, small or full size."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from residency.demo_size import SEED_NOISE, DemoSize
from residency.gpu.workload import Workload
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

# Its lazy exports have no types that a checker could see.
_diffusers: Any = importlib.import_module("diffusers")

CLIP_TOKENS_MAX = 77  # as many positions as the class has


def _assemble(components: Mapping[str, Any]) -> Any:
    scheduler = _diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return _diffusers.FluxPipeline(scheduler=scheduler, tokenizer=None, tokenizer_2=None, **components)


def _serve(pipeline: Any, size: DemoSize, shape: Workload, device: torch.device) -> torch.Tensor:
    """Return images, shape (batch, 3, height, width)."""
    clip_tokens = min(CLIP_TOKENS_MAX, size.text_tokens)
    clip_ids = size.prompt(0, batch=shape.batch, tokens=clip_tokens, device=device)
    t5_ids = size.prompt(1, batch=shape.batch, tokens=size.text_tokens, device=device)
    pooled = pipeline.text_encoder(clip_ids).pooler_output
    embeddings = pipeline.text_encoder_2(t5_ids)[0]
    images: torch.Tensor = pipeline(
        prompt_embeds=embeddings.to(size.dtype),
        pooled_prompt_embeds=pooled.to(size.dtype),
        width=shape.width,
        height=shape.height,
        num_inference_steps=shape.steps,
        generator=torch.Generator(device).manual_seed(SEED_NOISE),
        output_type="pt",
    ).images
    return images


def _vae(channels: tuple[int, ...], *, layers_per_block: int, norm_num_groups: int) -> Any:
    return _diffusers.AutoencoderKL(
        latent_channels=16,
        block_out_channels=channels,
        layers_per_block=layers_per_block,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=norm_num_groups,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )


SMALL = DemoSize(
    name="small",
    dtype=torch.float32,
    workload=Workload(width=128, height=128, frames=1, steps=6, batch=1),
    cap="64MiB",
    text_tokens=32,
    vocab=(128, 128),
    makers={
        "text_encoder": lambda: CLIPTextModel(
            CLIPTextConfig(
                hidden_size=128,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=2,
                projection_dim=128,
                vocab_size=128,
                bos_token_id=0,
                eos_token_id=1,
            )
        ),
        "text_encoder_2": lambda: T5EncoderModel(
            T5Config(
                d_model=256,
                d_ff=1024,
                num_layers=4,
                num_heads=4,
                d_kv=64,
                vocab_size=128,
                feed_forward_proj="gated-gelu",
            )
        ),
        "transformer": lambda: _diffusers.FluxTransformer2DModel(
            num_layers=3,
            num_single_layers=6,
            num_attention_heads=4,
            attention_head_dim=64,
            axes_dims_rope=(16, 24, 24),
            joint_attention_dim=256,
            pooled_projection_dim=128,
            guidance_embeds=True,
        ),
        "vae": lambda: _vae((32, 32, 64, 64), layers_per_block=1, norm_num_groups=8),
    },
    assemble=_assemble,
    serve=_serve,
    # Smaller than the workload, so that there is a probe to be seen.
    policy=Policy(image_area_max=64 * 64),
)
FLUX = DemoSize(
    name="flux",
    dtype=torch.bfloat16,
    workload=Workload(width=1024, height=1024, frames=1, steps=4, batch=1),
    cap="24GiB",
    text_tokens=512,
    vocab=(49000, 32000),
    makers={
        "text_encoder": lambda: CLIPTextModel(
            CLIPTextConfig(
                hidden_size=768,
                intermediate_size=3072,
                num_hidden_layers=12,
                num_attention_heads=12,
                projection_dim=768,
            )
        ),
        "text_encoder_2": lambda: T5EncoderModel(
            T5Config(
                d_model=4096,
                d_ff=10240,
                num_layers=24,
                num_heads=64,
                d_kv=64,
                vocab_size=32128,
                feed_forward_proj="gated-gelu",
            )
        ),
        "transformer": lambda: _diffusers.FluxTransformer2DModel(
            num_layers=19,
            num_single_layers=38,
            num_attention_heads=24,
            attention_head_dim=128,
            joint_attention_dim=4096,
            pooled_projection_dim=768,
            guidance_embeds=True,
        ),
        "vae": lambda: _vae((128, 256, 512, 512), layers_per_block=2, norm_num_groups=32),
    },
    assemble=_assemble,
    serve=_serve,
)
