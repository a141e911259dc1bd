"""Models of packages from PyPI, unmodified, planned automatically, against one device.

pip install --no-deps --target FOLDER -r integration_tests/third_party/packages.txt
PYTHONPATH=FOLDER python -m integration_tests.third_party                 # everything; writes docs/third-party.md
PYTHONPATH=FOLDER python -m integration_tests.third_party --only timm     # names that contain "timm"; writes nothing
"""
