"""Transformers and mixers of images and videos."""

from __future__ import annotations

from .making import Catalogue, floats, images, new, tokens

SMALL = {"dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, **SMALL}

IMAGE_TRANSFORMERS: Catalogue = {
    "vit-pytorch": {
        "ViT": lambda: (new("vit_pytorch:ViT", **VIT, dropout=0.1, emb_dropout=0.1), images()),
        "SimpleViT": lambda: (new("vit_pytorch:SimpleViT", **VIT), images()),
        "DeepViT": lambda: (new("vit_pytorch.deepvit:DeepViT", **VIT), images()),
        "CaiT": lambda: (new("vit_pytorch.cait:CaiT", **VIT, cls_depth=1, layer_dropout=0.1), images()),
        "CvT": lambda: (
            new(
                "vit_pytorch.cvt:CvT",
                num_classes=10,
                s1_emb_dim=8,
                s1_heads=1,
                s2_emb_dim=16,
                s2_heads=1,
                s2_depth=1,
                s3_emb_dim=32,
                s3_heads=2,
                s3_depth=1,
            ),
            images(64),
        ),
        "T2TViT": lambda: (
            new(
                "vit_pytorch.t2t:T2TViT",
                image_size=32,
                num_classes=10,
                dim=32,
                depth=1,
                heads=2,
                mlp_dim=64,
                t2t_layers=((7, 4), (3, 2)),
            ),
            images(),
        ),
        "CCT": lambda: (
            new(
                "vit_pytorch.cct:CCT",
                img_size=(32, 32),
                embedding_dim=32,
                n_conv_layers=1,
                num_layers=2,
                num_heads=2,
                mlp_ratio=2,
                num_classes=10,
                positional_embedding="learnable",
            ),
            images(),
        ),
        "CrossViT": lambda: (
            new(
                "vit_pytorch.cross_vit:CrossViT",
                image_size=32,
                num_classes=10,
                depth=1,
                sm_dim=16,
                sm_patch_size=8,
                sm_enc_depth=1,
                sm_enc_heads=2,
                sm_enc_mlp_dim=32,
                lg_dim=32,
                lg_patch_size=16,
                lg_enc_depth=1,
                lg_enc_heads=2,
                lg_enc_mlp_dim=32,
                cross_attn_depth=1,
                cross_attn_heads=2,
            ),
            images(),
        ),
        "PiT": lambda: (
            new(
                "vit_pytorch.pit:PiT",
                image_size=32,
                patch_size=8,
                dim=32,
                num_classes=10,
                depth=(1, 1),
                heads=2,
                mlp_dim=64,
            ),
            images(),
        ),
        "LeViT": lambda: (
            new(
                "vit_pytorch.levit:LeViT",
                image_size=64,
                num_classes=10,
                stages=2,
                dim=(32, 64),
                depth=1,
                heads=(2, 4),
                mlp_mult=2,
            ),
            images(64),
        ),
        "CrossFormer": lambda: (
            new(
                "vit_pytorch.crossformer:CrossFormer",
                dim=(32, 32, 32, 64),
                depth=(1, 1, 1, 1),
                global_window_size=(4, 2, 2, 1),
                local_window_size=(4, 4, 2, 1),
                num_classes=10,
            ),
            images(64),
        ),
        "MaxViT": lambda: (
            new(
                "vit_pytorch.max_vit:MaxViT",
                num_classes=10,
                dim_conv_stem=8,
                dim=16,
                dim_head=8,
                depth=(1, 1),
                window_size=4,
                mbconv_expansion_rate=2,
                dropout=0.1,
            ),
            images(64),
        ),
        "NesT": lambda: (
            new(
                "vit_pytorch.nest:NesT",
                image_size=32,
                patch_size=4,
                dim=16,
                heads=2,
                num_hierarchies=2,
                block_repeats=(1, 1),
                num_classes=10,
            ),
            images(),
        ),
        "MobileViT": lambda: (
            new(
                "vit_pytorch.mobile_vit:MobileViT",
                image_size=(64, 64),
                dims=[16, 16, 16],
                channels=[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16],
                num_classes=10,
                depths=(1, 1, 1),
            ),
            images(64),
        ),
        "XCiT": lambda: (
            new("vit_pytorch.xcit:XCiT", **VIT, cls_depth=1, local_patch_kernel_size=3),
            images(),
        ),
        "ViViT": lambda: (
            new(
                "vit_pytorch.vivit:ViViT",
                image_size=32,
                image_patch_size=16,
                frames=4,
                frame_patch_size=2,
                num_classes=10,
                dim=32,
                spatial_depth=1,
                temporal_depth=1,
                heads=2,
                mlp_dim=64,
            ),
            (floats(4, 3, 4, 32, 32),),
        ),
        "RegisterViT": lambda: (
            new("vit_pytorch.simple_vit_with_register_tokens:SimpleViT", **VIT),
            images(),
        ),
        "parallel ViT": lambda: (
            new("vit_pytorch.parallel_vit:ViT", **VIT, num_parallel_branches=2),
            images(),
        ),
    },
    "mlp-mixer-pytorch": {
        "MLPMixer": lambda: (
            new(
                "mlp_mixer_pytorch:MLPMixer",
                image_size=32,
                channels=3,
                patch_size=8,
                dim=32,
                depth=2,
                num_classes=10,
            ),
            images(),
        ),
    },
    "res-mlp-pytorch": {
        "ResMLP": lambda: (
            new("res_mlp_pytorch:ResMLP", image_size=32, patch_size=8, dim=32, depth=2, num_classes=10),
            images(),
        ),
    },
    "g-mlp-pytorch": {
        "gMLPVision": lambda: (
            new("g_mlp_pytorch:gMLPVision", image_size=32, patch_size=8, num_classes=10, dim=32, depth=2),
            images(),
        ),
        "gMLP": lambda: (
            new("g_mlp_pytorch:gMLP", num_tokens=64, dim=32, depth=2, seq_len=16, causal=True),
            (tokens(),),
        ),
    },
    "glom-pytorch": {
        "Glom": lambda: (new("glom_pytorch:Glom", dim=32, levels=2, image_size=32, patch_size=8), images()),
    },
    "uniformer-pytorch": {
        "Uniformer": lambda: (
            new(
                "uniformer_pytorch:Uniformer",
                num_classes=10,
                dims=(8, 16, 16, 32),
                depths=(1, 1, 1, 1),
                mhsa_types=("l", "l", "g", "g"),
                dim_head=8,
            ),
            (floats(4, 3, 8, 32, 32),),
        ),
    },
    "timesformer-pytorch": {
        "TimeSformer": lambda: (
            new(
                "timesformer_pytorch:TimeSformer",
                dim=32,
                image_size=32,
                patch_size=16,
                num_frames=4,
                num_classes=10,
                depth=2,
                heads=2,
                dim_head=16,
                attn_dropout=0.1,
                ff_dropout=0.1,
            ),
            (floats(4, 4, 3, 32, 32),),
        ),
    },
    "halonet-pytorch": {
        "HaloAttention": lambda: (
            new(
                "torch.nn:Sequential",
                new("torch.nn:Conv2d", 3, 16, 3, padding=1),
                new("halonet_pytorch:HaloAttention", dim=16, block_size=4, halo_size=2, dim_head=8, heads=2),
                new("torch.nn:Conv2d", 16, 8, 3, padding=1),
            ),
            images(),
        ),
    },
    "bottleneck-transformer-pytorch": {
        "BottleStack": lambda: (
            new(
                "bottleneck_transformer_pytorch:BottleStack",
                dim=16,
                fmap_size=16,
                dim_out=32,
                proj_factor=4,
                downsample=True,
                heads=2,
                dim_head=8,
            ),
            images(16, 16),
        ),
    },
    "lambda-networks": {
        "LambdaLayer": lambda: (
            new(
                "torch.nn:Sequential",
                new("torch.nn:Conv2d", 3, 16, 3, padding=1),
                new("lambda_networks:LambdaLayer", dim=16, dim_out=16, r=5, dim_k=8, heads=2, dim_u=1),
                new("torch.nn:ReLU"),
                new("torch.nn:Conv2d", 16, 8, 1),
            ),
            images(16),
        ),
    },
    "axial-attention": {
        "AxialImageTransformer": lambda: (
            new("axial_attention:AxialImageTransformer", dim=16, depth=2, reversible=False, heads=2),
            images(8, 16),
        ),
        "AxialAttention": lambda: (
            new("axial_attention:AxialAttention", dim=16, dim_index=1, heads=2, num_dimensions=2),
            images(8, 16),
        ),
    },
    "swin-transformer-pytorch": {
        "SwinTransformer": lambda: (
            new(
                "swin_transformer_pytorch:SwinTransformer",
                hidden_dim=16,
                layers=(2, 2, 2, 2),
                heads=(2, 2, 2, 2),
                channels=3,
                num_classes=10,
                head_dim=8,
                window_size=2,
                downscaling_factors=(2, 2, 2, 2),
                relative_pos_embedding=True,
            ),
            images(),
        ),
    },
    "deformable-attention": {
        "DeformableAttention": lambda: (
            new(
                "deformable_attention:DeformableAttention",
                dim=16,
                dim_head=8,
                heads=2,
                downsample_factor=2,
                offset_kernel_size=4,
            ),
            images(16, 16),
        ),
    },
    "slot-attention": {
        "SlotAttention": lambda: (
            new("slot_attention:SlotAttention", num_slots=4, dim=32, iters=2),
            (floats(4, 16, 32),),
        ),
    },
    "soft-moe-pytorch": {
        "SoftMoE": lambda: (
            new("soft_moe_pytorch:SoftMoE", dim=32, seq_len=16, num_experts=4),
            (floats(4, 16, 32),),
        ),
        "DynamicSlotsSoftMoE": lambda: (
            new("soft_moe_pytorch:DynamicSlotsSoftMoE", dim=32, num_experts=4),
            (floats(4, 16, 32),),
        ),
    },
    "isab-pytorch": {
        "ISAB": lambda: (
            new("isab_pytorch:ISAB", dim=32, heads=2, num_latents=8),
            (floats(4, 16, 32),),
        ),
    },
}
