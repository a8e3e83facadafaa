"""Three real pipeline classes in tiny, seeded configurations, built once for the whole folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from residency.gpu.adapters import components_of
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT

WORDS = ["<pad>", "</s>", "<unk>", "a", "cat", "on", "the", "moon", "photo", "of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A pipeline and one seeded request to it."""

    pipe: Any
    request: Callable[[], torch.Tensor]


def library(name: str) -> Any:
    """Import a library of the diffusers extra, or skip: its types are not worth checking here."""
    return pytest.importorskip(name)


def make_tokenizer(*, model_max_length: int) -> Any:
    tokenizers, transformers = library("tokenizers"), library("transformers")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def make_clip(*, projection_dim: int = 32) -> Any:
    transformers = library("transformers")
    config = transformers.CLIPTextConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=16,
        projection_dim=projection_dim,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.CLIPTextModel(config)


def make_t5(kind: str = "T5") -> Any:
    transformers = library("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=16, d_model=32, d_kv=8, d_ff=37, num_layers=3, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def make_flux() -> Any:
    diffusers = library("diffusers")
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=1,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    )
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=make_clip(),
        tokenizer=make_tokenizer(model_max_length=16),
        text_encoder_2=make_t5(),
        tokenizer_2=make_tokenizer(model_max_length=16),
        transformer=transformer,
    )


def make_stable_diffusion() -> Any:
    diffusers = library("diffusers")
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=2,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=2,
        attention_head_dim=2,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
    )
    return diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=make_clip(),
        tokenizer=make_tokenizer(model_max_length=16),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def make_wan() -> Any:
    diffusers = library("diffusers")
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return diffusers.WanPipeline(
        tokenizer=make_tokenizer(model_max_length=16),
        text_encoder=make_t5("UMT5"),
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def call_arguments(name: str) -> dict[str, Any]:
    """Return the arguments of one small request; the steps are few, the sizes the least that the class takes."""
    sizes = {"flux": (8, 8), "stable-diffusion": (32, 32), "wan": (16, 16)}
    width, height = sizes[name]
    common = {"prompt": "a photo of the moon", "width": width, "height": height, "num_inference_steps": 2}
    extra: dict[str, dict[str, Any]] = {
        "flux": {"max_sequence_length": 16, "guidance_scale": 3.5},
        "stable-diffusion": {"guidance_scale": 7.5},
        "wan": {"num_frames": 5, "guidance_scale": 6.0, "max_sequence_length": 16},
    }
    return {**common, **extra[name], "output_type": "pt"}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are so small that waking a second thread costs more than it computes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["flux", "stable-diffusion", "wan"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A pipeline with seeded weights in eval mode, and a request that draws its noise from a fixed seed."""
    makers = {"flux": make_flux, "stable-diffusion": make_stable_diffusion, "wan": make_wan}
    torch.manual_seed(0)
    pipe = makers[request.param]()
    pipe.set_progress_bar_config(disable=True)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval()
    arguments = call_arguments(request.param)

    def run() -> torch.Tensor:
        result: torch.Tensor = pipe(**arguments, generator=torch.Generator("cpu").manual_seed(7))[0]
        return result

    yield Subject(pipe=pipe, request=run)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """An emulated device with room for everything."""
    device = EmulatedDevice(total_bytes=2**32)
    yield device
    device.close()


@pytest.fixture
def managed(subject: Subject, device: EmulatedDevice) -> Iterator[ManagedPipeline]:
    """The subject under management, every component resident; detached at the end."""
    modules, owner = components_of(subject.pipe)
    pipeline = ManagedPipeline(modules, device=device, owner=owner)
    for name in modules:
        pipeline.place(name, RESIDENT)
    yield pipeline
    pipeline.detach()
