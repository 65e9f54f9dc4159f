"""The conversation with the Hub: everything is uploaded first, then one commit names it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from milepost.errors import MissingExtraError, PublishError
from milepost.tools.publish_files import Publication

if TYPE_CHECKING:
    from milepost.tools.publish import PublishReport, PublishTo, StaleWeights, Visibility

Result = TypeVar("Result")

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_BUSY = (408, 429, 500, 502, 503, 504)
_LOADED = re.compile(
    r"(?:model|adapter_model|pytorch_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?"
    r"|adapter_config\.json"
)


class Hub:
    """One repository of models. `attempts` are those of one request, the first included."""

    def __init__(
        self, repo: str, *, endpoint: str | None, token: str | None, attempts: int
    ) -> None:
        try:
            import huggingface_hub
        except ImportError as error:
            raise MissingExtraError(
                "publishing needs huggingface_hub; pip install 'milepost[hf]'"
            ) from error
        self._hub = huggingface_hub
        self._api = huggingface_hub.HfApi(endpoint=endpoint, token=token, library_name="milepost")
        self.repo = repo
        self._attempts = attempts

    def upload(
        self,
        found: Publication,
        *,
        to: PublishTo,
        visibility: Visibility,
        stale: StaleWeights,
        revision: str | None,
        message: str,
    ) -> PublishReport:
        """Make the repository if need be, upload, commit; what was there stays until the commit."""
        from milepost.tools.publish import PublishReport, PublishTo, StaleWeights

        is_pull_request = to is PublishTo.PULL_REQUEST
        self._create(visibility)
        if revision is not None and not is_pull_request:
            self._retried("create the branch", lambda: self._branch(revision))
        contents: dict[str, Path | bytes] = {**found.paths, **found.documents}
        additions = [
            self._hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
            for name, content in sorted(contents.items(), key=lambda item: item[0])
        ]
        old = self._listed(revision) if stale is StaleWeights.REMOVE else []
        removed = [n for n in old if _LOADED.fullmatch(n) and n not in found.sizes()]
        keywords: dict[str, Any] = {"revision": revision, "create_pr": is_pull_request}
        self._retried(
            "upload the files",
            lambda: self._api.preupload_lfs_files(
                self.repo, additions, free_memory=False, **keywords
            ),
        )
        deletions = [self._hub.CommitOperationDelete(path_in_repo=name) for name in removed]
        # A commit whose answer was lost finds nothing to change when it is made again; a pull
        # request would be opened a second time.
        commit = self._retried(
            "commit",
            lambda: self._api.create_commit(
                self.repo, [*additions, *deletions], commit_message=message, **keywords
            ),
            after_lost_answers=not is_pull_request,
        )
        return PublishReport(
            repo=self.repo,
            files=found.sizes(),
            removed=tuple(removed),
            notes=tuple(found.notes),
            commit=commit.oid,
            url=commit.commit_url,
            pull_request=commit.pr_url,
        )

    def _create(self, visibility: Visibility) -> None:
        from milepost.tools.publish import Visibility

        private = {Visibility.PUBLIC: False, Visibility.PRIVATE: True}.get(visibility)
        self._retried(
            "create the repository",
            lambda: self._api.create_repo(
                self.repo, private=private, repo_type="model", exist_ok=True
            ),
        )
        if visibility is not Visibility.PRIVATE:
            return
        info = self._retried("look at it", lambda: self._api.model_info(self.repo))
        if info.private is not True:
            raise PublishError(
                f"{self.repo}: is there already and public, private was asked for; nothing was "
                "uploaded: make it private on the Hub, or publish under another name"
            )

    def _branch(self, revision: str) -> None:
        self._api.create_branch(self.repo, branch=revision, exist_ok=True)

    def _listed(self, revision: str | None) -> list[str]:
        names: list[str] = self._retried(
            "list its files", lambda: self._api.list_repo_files(self.repo, revision=revision)
        )
        return names

    def _retried(
        self, what: str, call: Callable[[], Result], *, after_lost_answers: bool = True
    ) -> Result:
        """`call()`, made again while the Hub is busy or, if that does no harm, not reached."""
        wait_s = _FIRST_WAIT_S
        for attempt in range(1, self._attempts + 1):
            try:
                return call()
            except Exception as error:
                problem = _problem_of(error)
                if problem is None:
                    raise
                again = problem.status in _BUSY or (problem.status is None and after_lost_answers)
                if attempt == self._attempts or not again or _is_final(error):
                    raise PublishError(
                        f"{self.repo}: could not {what}: {problem}; what the repository held "
                        f"before is unchanged{_advice(problem.status)}",
                        status=problem.status,
                    ) from error
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("the last attempt returns or raises")


def _problem_of(error: BaseException) -> PublishError | None:
    """What the Hub or the way there answered; None for an error that is neither's."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    root = type(error).__module__.partition(".")[0]
    if root not in ("huggingface_hub", "httpx", "httpx2", "requests") and status is None:
        if isinstance(error, RuntimeError) and error.__cause__ is not None:
            return _problem_of(error.__cause__)  # an upload that failed in one of its threads
        if not isinstance(error, OSError | ValueError):
            return None
    text = " ".join(str(error).split()) or type(error).__name__
    return PublishError(text, status=status)


def _is_final(error: BaseException) -> bool:
    """Errors that no second attempt changes: a bad name, bad metadata, offline mode."""
    return isinstance(error, ValueError) or type(error).__name__ == "OfflineModeIsEnabled"


def _advice(status: int | None) -> str:
    texts: Mapping[int | None, str] = {
        401: "; log in (hf auth login), or set HF_TOKEN",
        403: "; the token may not write there",
        404: "; there is no such repository, or the token does not see it",
    }
    return texts.get(status, "")
