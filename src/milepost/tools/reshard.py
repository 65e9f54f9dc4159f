"""`reshard`: the same weights in parts of another size."""

from __future__ import annotations

from milepost.storage.fileops import PathLike
from milepost.tools.rewrite.groups import passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import open_source


def reshard(
    source: PathLike, output: PathLike, *, options: RewriteOptions | None = None
) -> RewriteReport:
    """Write the weights of `source` as the directory `output`, in parts of `max_shard_size`.

    Every tensor keeps its bytes. What is training state stays behind (`milepost export
    --with-training-state` takes it along). Errors: see `run_rewrite`.
    """
    opened = open_source(source)
    rewrite = Rewrite(
        verb="reshard",
        sources=[opened],
        groups=[passed(tensor) for tensor in opened.tensors.values()],
        arguments={"max_shard_size": None if options is None else options.max_shard_size},
    )
    return run_rewrite(rewrite, output, options)
