"""The demo's pipeline: diffusers' real Flux classes with seeded random weights, small or full size."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from residency.gpu.workload import Workload
from residency.statemachine.policy import Policy

# Its lazy exports have no types that a checker could see.
_diffusers: Any = importlib.import_module("diffusers")

SEED_WEIGHTS, SEED_PROMPT, SEED_NOISE = 0, 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """One size of the demo's pipeline.

    cap: the default memory cap, smaller than the weights. vocab: of the two text encoders.
    """

    name: str
    dtype: torch.dtype
    workload: Workload
    cap: str
    text_tokens: int
    vocab: tuple[int, int]
    policy: Policy = field(default_factory=Policy)


SMALL = DemoSize(
    name="small",
    dtype=torch.float32,
    workload=Workload(width=128, height=128, frames=1, steps=6, batch=1),
    cap="64MiB",
    text_tokens=32,
    vocab=(128, 128),
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
)
COMPONENTS = ("text_encoder", "text_encoder_2", "transformer", "vae")
SIZES = {size.name: size for size in (SMALL, FLUX)}


def build(size: DemoSize, *, device: torch.device) -> Any:
    """Return a Flux pipeline in host memory whose weights were drawn on `device` from a fixed seed.

    Each component is drawn on the device on its own and moved to the host, so that a cap on the device which
    holds the largest of them is never exceeded, and 31 GiB take seconds.
    """
    makers = _flux_makers() if size is FLUX else _small_makers()
    components: dict[str, Any] = {}
    for name, make in makers.items():
        torch.manual_seed(SEED_WEIGHTS)
        default = torch.get_default_dtype()
        torch.set_default_dtype(size.dtype)
        try:
            with device:
                module = make()
        finally:
            torch.set_default_dtype(default)
        components[name] = module.to("cpu").eval().requires_grad_(False)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    scheduler = _diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = _diffusers.FluxPipeline(scheduler=scheduler, tokenizer=None, tokenizer_2=None, **components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def request(pipeline: Any, size: DemoSize, shape: Workload, *, device: torch.device) -> torch.Tensor:
    """Serve one text-to-image request of the given shape; returns images, shape (batch, 3, height, width)."""
    clip_ids, t5_ids = (
        torch.randint(0, vocab, (shape.batch, length), generator=torch.Generator().manual_seed(SEED_PROMPT + index))
        for index, (vocab, length) in enumerate(
            zip(size.vocab, (min(77, size.text_tokens), size.text_tokens), strict=True)
        )
    )
    with torch.no_grad():
        pooled = pipeline.text_encoder(clip_ids.to(device)).pooler_output
        embeddings = pipeline.text_encoder_2(t5_ids.to(device))[0]
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


def _flux_makers() -> dict[str, Any]:
    return {
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
    }


def _small_makers() -> dict[str, Any]:
    return {
        "text_encoder": lambda: CLIPTextModel(
            CLIPTextConfig(
                hidden_size=128,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=2,
                projection_dim=128,
                vocab_size=SMALL.vocab[0],
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
                vocab_size=SMALL.vocab[1],
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
    }


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
