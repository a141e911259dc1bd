"""Every architecture of transformers that a tiny config can build, planned automatically, against one device.

python -m integration_tests.architectures                  # everything, on reused ranks; writes docs/architectures.md
python -m integration_tests.architectures --only Llama     # classes whose name contains "Llama"; writes nothing
"""
