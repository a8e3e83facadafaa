"""The demo's text-to-video pipeline: diffusers' real Wan classes, small or of the 14B model's dimensions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import UMT5Config, UMT5EncoderModel

from residency.demo_size import SEED_NOISE, DemoSize
from residency.gpu.workload import Workload
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

# Its lazy exports have no types that a checker could see.
_diffusers: Any = importlib.import_module("diffusers")

# Without classifier-free guidance, so that a step runs the transformer once, as distilled few-step models do.
GUIDANCE_SCALE = 1.0


def _assemble(components: Mapping[str, Any]) -> Any:
    # It keeps nothing between requests; the multistep solver that Wan ships with would keep its last outputs.
    scheduler = _diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return _diffusers.WanPipeline(scheduler=scheduler, tokenizer=None, **components)


def _serve(pipeline: Any, size: DemoSize, shape: Workload, device: torch.device) -> torch.Tensor:
    """Return videos, shape (batch, frames, 3, height, width); the transformer runs once a step."""
    ids = size.prompt(0, batch=shape.batch, tokens=size.text_tokens, device=device)
    embeddings = pipeline.text_encoder(ids, torch.ones_like(ids)).last_hidden_state
    videos: torch.Tensor = pipeline(
        prompt_embeds=embeddings.to(size.dtype),
        width=shape.width,
        height=shape.height,
        num_frames=shape.frames,
        num_inference_steps=shape.steps,
        guidance_scale=GUIDANCE_SCALE,
        generator=torch.Generator(device).manual_seed(SEED_NOISE),
        output_type="pt",
    ).frames
    return videos


def _text_encoder(*, width: int, feed_forward: int, layers: int, heads: int, vocab: int) -> Any:
    return UMT5EncoderModel(
        UMT5Config(
            d_model=width,
            d_ff=feed_forward,
            num_layers=layers,
            num_heads=heads,
            d_kv=width // heads,
            vocab_size=vocab,
            feed_forward_proj="gated-gelu",
        )
    )


def _transformer(*, heads: int, head_width: int, feed_forward: int, layers: int, text_width: int) -> Any:
    return _diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=head_width,
        in_channels=16,
        out_channels=16,
        text_dim=text_width,
        freq_dim=256,
        ffn_dim=feed_forward,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )


SMALL_WAN = DemoSize(
    name="small-wan",
    dtype=torch.float32,
    workload=Workload(width=32, height=32, frames=17, steps=6, batch=1),
    cap="16MiB",
    text_tokens=32,
    vocab=(256,),
    makers={
        "text_encoder": lambda: _text_encoder(width=128, feed_forward=512, layers=4, heads=4, vocab=256),
        "transformer": lambda: _transformer(heads=4, head_width=48, feed_forward=512, layers=6, text_width=128),
        "vae": lambda: _diffusers.AutoencoderKLWan(
            base_dim=8, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
    },
    assemble=_assemble,
    serve=_serve,
    # Smaller than the workload, so that there is a probe to be seen.
    policy=Policy(video_frames_max=9),
)
WAN = DemoSize(
    name="wan",
    dtype=torch.bfloat16,
    workload=Workload(width=832, height=480, frames=33, steps=4, batch=1),
    cap="32GiB",
    text_tokens=512,
    vocab=(256_384,),
    makers={
        "text_encoder": lambda: _text_encoder(width=4096, feed_forward=10_240, layers=24, heads=64, vocab=256_384),
        "transformer": lambda: _transformer(heads=40, head_width=128, feed_forward=13_824, layers=40, text_width=4096),
        "vae": lambda: _diffusers.AutoencoderKLWan(z_dim=16),
    },
    assemble=_assemble,
    serve=_serve,
)
