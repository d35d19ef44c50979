from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()  # before any test of this folder imports transformers or timm
