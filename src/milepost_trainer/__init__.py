"""The reference trainer: small, driven by one YAML, on torch's parallelism and `milepost` alone.

    torchrun --nproc-per-node 4 -m milepost_trainer run.yaml
    milepost-train run.yaml

`docs/guides/trainer.md` has the keys. A run killed at any point and started again with
`resume_from_checkpoint: true` goes on where it was, on the same mesh bit by bit, on any other with
the same weights, moments and data position.
"""
