"""What has a machine of this type: how many CPUs, how many GPUs? For the types that people train on; data only.

Sources: the clouds' own pages on machine types (AWS: vCPUs and GPUs of the EC2 instance types; Google Cloud: G2, A2, A3 and
general-purpose machines; Azure: the NC and ND series). A type that is not here is no mistake; it has to be described.
"""

from __future__ import annotations

_ONE_GPU = {"xlarge": 4, "2xlarge": 8, "4xlarge": 16, "8xlarge": 32, "16xlarge": 64}
_GENERAL = {"large": 2, "xlarge": 4, "2xlarge": 8, "4xlarge": 16, "8xlarge": 32}
_MORE_GPUS = {"12xlarge": (48, 4), "24xlarge": (96, 4), "48xlarge": (192, 8)}

AWS: dict[str, tuple[int, int]] = {
    **{f"{family}.{size}": (cpus, 0) for family in ("m5", "m6i", "m7i") for size, cpus in _GENERAL.items()},
    **{f"{family}.{size}": (cpus, 1) for family in ("g5", "g6", "g6e") for size, cpus in _ONE_GPU.items()},
    **{f"{family}.{size}": has for family in ("g5", "g6", "g6e") for size, has in _MORE_GPUS.items()},
    **{f"g4dn.{size}": (cpus, 1) for size, cpus in _ONE_GPU.items()},
    "g4dn.12xlarge": (48, 4),
    "g4dn.metal": (96, 8),
    "p3.2xlarge": (8, 1),
    "p3.8xlarge": (32, 4),
    "p3.16xlarge": (64, 8),
    "p4d.24xlarge": (96, 8),
    "p4de.24xlarge": (96, 8),
    "p5.48xlarge": (192, 8),
    "p5en.48xlarge": (192, 8),
}

GCP: dict[str, tuple[int, int]] = {
    **{f"{family}-standard-{cpus}": (cpus, 0) for family in ("e2", "n2", "n4") for cpus in (2, 4, 8, 16, 32)},
    **{f"g2-standard-{cpus}": (cpus, 1) for cpus in (4, 8, 12, 16, 32)},
    "g2-standard-24": (24, 2),
    "g2-standard-48": (48, 4),
    "g2-standard-96": (96, 8),
    **{f"a2-highgpu-{gpus}g": (12 * gpus, gpus) for gpus in (1, 2, 4, 8)},
    **{f"a2-ultragpu-{gpus}g": (12 * gpus, gpus) for gpus in (1, 2, 4, 8)},
    "a3-highgpu-8g": (208, 8),
}

AZURE: dict[str, tuple[int, int]] = {
    **{f"Standard_D{cpus}s_v{n}": (cpus, 0) for n in (3, 5) for cpus in (2, 4, 8, 16, 32)},
    "Standard_NC4as_T4_v3": (4, 1),
    "Standard_NC8as_T4_v3": (8, 1),
    "Standard_NC16as_T4_v3": (16, 1),
    "Standard_NC64as_T4_v3": (64, 4),
    "Standard_NC24ads_A100_v4": (24, 1),
    "Standard_NC48ads_A100_v4": (48, 2),
    "Standard_NC96ads_A100_v4": (96, 4),
    "Standard_NC40ads_H100_v5": (40, 1),
    "Standard_NC80adis_H100_v5": (80, 2),
    "Standard_ND96asr_v4": (96, 8),
    "Standard_ND96isr_H100_v5": (96, 8),
}

BY_PROVIDER: dict[str, dict[str, tuple[int, int]]] = {"aws": AWS, "gcp": GCP, "azure": AZURE}
"""Machine types of a provider, as (CPUs, GPUs)."""
