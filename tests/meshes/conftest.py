"""What has to be said before JAX is imported: eight CPU devices instead of an accelerator."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
