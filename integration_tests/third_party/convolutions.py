"""Convolutional networks, segmentation, and the large libraries of image models."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from .making import Catalogue, Made, floats, images, new, tokens


def _timm(name: str, size: int = 64, **options: Any) -> Made:
    return new("timm:create_model", name, num_classes=10, **options), images(size)


def _segmentation(name: str, **options: Any) -> Made:
    model = new(
        f"segmentation_models_pytorch:{name}",
        encoder_name="resnet18",
        encoder_weights=None,
        in_channels=3,
        classes=2,
        **options,
    )
    return model, images(128)


def _monai(name: str, *arguments: Any, shape: tuple[int, ...] = (1, 32, 32), **options: Any) -> Made:
    return new(f"monai.networks.nets:{name}", *arguments, **options), (floats(4, *shape),)


def _clip() -> nn.Module:
    vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16}
    text = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
    model: nn.Module = new("open_clip.model:CLIP", embed_dim=16, vision_cfg=vision, text_cfg=text)
    return model


CONVOLUTIONS: Catalogue = {
    "timm": {
        "resnet10t": partial(_timm, "resnet10t"),
        "resnetv2 (weight-standardised)": partial(
            _timm, "resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 32, 48, 64), stem_chs=16
        ),
        "regnetx_002": partial(_timm, "regnetx_002"),
        "efficientnet_lite0": partial(_timm, "efficientnet_lite0", 128, drop_rate=0.2, drop_path_rate=0.1),
        "mobilenetv3_small": partial(_timm, "mobilenetv3_small_050"),
        "convnext_atto": partial(
            _timm, "convnext_atto", dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), drop_path_rate=0.1
        ),
        "vit_tiny": partial(
            _timm, "vit_tiny_patch16_224", 32, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2
        ),
        "deit3_small": partial(
            _timm,
            "deit3_small_patch16_224",
            32,
            img_size=32,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=2,
        ),
        "swin_tiny": partial(
            _timm,
            "swin_tiny_patch4_window7_224",
            img_size=64,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            window_size=4,
        ),
        "beit": partial(
            _timm, "beit_base_patch16_224", 32, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2
        ),
        "maxvit_nano": partial(
            _timm,
            "maxvit_nano_rw_256",
            img_size=64,
            embed_dim=(32, 64),
            depths=(1, 1),
            stem_width=16,
        ),
        "hrnet_w18_small": partial(_timm, "hrnet_w18_small"),
        "densenet (small)": partial(_timm, "densenet121", block_config=(2, 2), growth_rate=8),
        "ghostnet_050": partial(_timm, "ghostnet_050"),
        "coatnet": partial(
            _timm,
            "coatnet_0_rw_224",
            img_size=64,
            embed_dim=(16, 32, 32, 64),
            depths=(1, 1, 1, 1),
            stem_width=(8, 16),
        ),
        "cait": partial(
            _timm, "cait_xxs24_224", 32, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2
        ),
        "eva02": partial(
            _timm,
            "eva02_tiny_patch14_224",
            28,
            img_size=28,
            patch_size=14,
            embed_dim=32,
            depth=2,
            num_heads=2,
        ),
        "dla46x_c": partial(_timm, "dla46x_c", 128),
        "nfnet": partial(_timm, "nf_resnet26"),
    },
    "efficientnet-pytorch": {
        "EfficientNet": lambda: (
            new(
                "efficientnet_pytorch:EfficientNet",
                *new(
                    "efficientnet_pytorch.utils:efficientnet",
                    width_coefficient=0.25,
                    depth_coefficient=0.3,
                    image_size=32,
                    num_classes=10,
                ),
            ),
            images(),
        ),
    },
    "segmentation-models-pytorch": {
        "Unet": partial(_segmentation, "Unet", decoder_channels=(32, 16, 16, 8, 8)),
        "FPN": partial(_segmentation, "FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32),
        "PSPNet": partial(_segmentation, "PSPNet", psp_out_channels=32),
        "DeepLabV3Plus": partial(_segmentation, "DeepLabV3Plus", decoder_channels=16),
        "Linknet": partial(_segmentation, "Linknet"),
        "UnetPlusPlus": partial(_segmentation, "UnetPlusPlus", decoder_channels=(32, 16, 16, 8, 8)),
    },
    "monai": {
        "UNet": partial(
            _monai,
            "UNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            channels=(8, 16, 32),
            strides=(2, 2),
            num_res_units=1,
        ),
        "BasicUNet": partial(
            _monai, "BasicUNet", spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 16, 32, 8)
        ),
        "AttentionUnet": partial(
            _monai,
            "AttentionUnet",
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            channels=(8, 16, 32),
            strides=(2, 2),
        ),
        "SegResNet": partial(
            _monai,
            "SegResNet",
            spatial_dims=2,
            init_filters=8,
            in_channels=1,
            out_channels=2,
            dropout_prob=0.1,
        ),
        "UNETR": partial(
            _monai,
            "UNETR",
            1,
            2,
            (32, 32),
            feature_size=8,
            hidden_size=48,
            mlp_dim=64,
            num_heads=4,
            spatial_dims=2,
        ),
        "SwinUNETR": partial(
            _monai,
            "SwinUNETR",
            in_channels=1,
            out_channels=2,
            feature_size=12,
            spatial_dims=2,
            depths=(1, 1, 1, 1),
            num_heads=(1, 2, 2, 4),
            shape=(1, 64, 64),
        ),
        "DenseNet": partial(
            _monai,
            "DenseNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=3,
            init_features=8,
            growth_rate=4,
            block_config=(2, 2),
        ),
        "ViT": partial(
            _monai,
            "ViT",
            in_channels=1,
            img_size=(32, 32),
            patch_size=8,
            hidden_size=32,
            mlp_dim=64,
            num_layers=2,
            num_heads=2,
            classification=True,
            spatial_dims=2,
        ),
        "VNet": partial(_monai, "VNet", spatial_dims=3, in_channels=1, out_channels=2, shape=(1, 16, 16, 16)),
        "DynUNet": partial(
            _monai,
            "DynUNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            kernel_size=(3, 3, 3),
            strides=(1, 2, 2),
            upsample_kernel_size=(2, 2),
            filters=(8, 16, 32),
        ),
    },
    "open-clip-torch": {
        "CLIP": lambda: (_clip(), {"image": images()[0], "text": tokens(16, 64)}),
    },
    "segment-anything": {
        "ImageEncoderViT": lambda: (
            new(
                "segment_anything.modeling:ImageEncoderViT",
                img_size=64,
                patch_size=8,
                embed_dim=32,
                depth=2,
                num_heads=2,
                out_chans=16,
                use_rel_pos=True,
                window_size=4,
                global_attn_indexes=(1,),
            ),
            images(64),
        ),
    },
    "facenet-pytorch": {
        "InceptionResnetV1": lambda: (
            new("facenet_pytorch:InceptionResnetV1", classify=True, num_classes=10),
            images(160),
        ),
    },
    "resnest": {
        "resnest": lambda: (
            new(
                "resnest.torch.resnet:ResNet",
                new(
                    "builtins:getattr",
                    new("importlib:import_module", "resnest.torch.resnet"),
                    "Bottleneck",
                ),
                [1, 1, 1, 1],
                radix=2,
                groups=1,
                bottleneck_width=16,
                deep_stem=True,
                stem_width=8,
                avg_down=True,
                num_classes=10,
            ),
            images(64),
        ),
    },
    "unet": {
        "UNet2D": lambda: (
            new(
                "unet:UNet2D",
                normalization="batch",
                num_encoding_blocks=2,
                out_channels_first_layer=8,
                padding=1,
            ),
            images(32, 1),
        ),
    },
    "unet-pytorch": {
        "UNet": lambda: (new("unet_pytorch.model:UNet", in_channels=3, out_channels=2), images()),
    },
    "dynamic-network-architectures": {
        "ResidualEncoderUNet": lambda: (
            new(
                "dynamic_network_architectures.architectures.unet:ResidualEncoderUNet",
                input_channels=1,
                n_stages=3,
                features_per_stage=(8, 16, 32),
                conv_op=nn.Conv2d,
                kernel_sizes=3,
                strides=(1, 2, 2),
                n_blocks_per_stage=(1, 1, 1),
                num_classes=2,
                n_conv_per_stage_decoder=(1, 1),
                conv_bias=True,
                norm_op=nn.InstanceNorm2d,
                norm_op_kwargs={"affine": True},
                nonlin=nn.LeakyReLU,
                nonlin_kwargs={"inplace": True},
            ),
            images(32, 1),
        ),
        "PlainConvUNet": lambda: (
            new(
                "dynamic_network_architectures.architectures.unet:PlainConvUNet",
                input_channels=1,
                n_stages=3,
                features_per_stage=(8, 16, 32),
                conv_op=nn.Conv2d,
                kernel_sizes=3,
                strides=(1, 2, 2),
                n_conv_per_stage=(1, 1, 1),
                num_classes=2,
                n_conv_per_stage_decoder=(1, 1),
                conv_bias=True,
                norm_op=nn.InstanceNorm2d,
                norm_op_kwargs={"affine": True},
                nonlin=nn.LeakyReLU,
                nonlin_kwargs={"inplace": True},
            ),
            images(32, 1),
        ),
    },
    "kornia": {
        "VisionTransformer": lambda: (
            new(
                "kornia.models.vit:VisionTransformer",
                image_size=32,
                patch_size=8,
                embed_dim=32,
                depth=2,
                num_heads=2,
            ),
            images(),
        ),
    },
    "lightly": {
        "SimCLRProjectionHead": lambda: (
            new("lightly.models.modules:SimCLRProjectionHead", 32, 64, 16),
            (floats(8, 32),),
        ),
        "BYOL heads": lambda: (
            new(
                "torch.nn:Sequential",
                new("lightly.models.modules:BYOLProjectionHead", 32, 64, 16),
                new("lightly.models.modules:BYOLPredictionHead", 16, 64, 16),
            ),
            (floats(8, 32),),
        ),
    },
}
