"""What all tests share: no time limit per hypothesis example, since machines and disks vary."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("milepost", deadline=None)
settings.load_profile("milepost")
