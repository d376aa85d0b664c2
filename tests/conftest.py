"""Settings of every unit test."""

from hypothesis import settings

# A slow machine is no defect of the code: time belongs into benchmarks.
settings.register_profile("everywhere", deadline=None)
settings.load_profile("everywhere")
