"""Does the directory work? Load it, run it, look at the numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.errors import MissingExtraError, NotFoundError
from milepost.hf.foreign_calls import attempt

if TYPE_CHECKING:
    import torch

_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "AutoModel",
)
_PROMPT = "The quick brown fox"
_PROBE_TOKENS = 8
_NEW_TOKENS = 8
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class RemoteCode(Enum):
    """Whether Python modules inside the checkpoint may run."""

    REFUSE = "refuse"
    RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionalReport:
    """What a model did when it was run; `problems` is empty when all is well."""

    directory: str
    architecture: str | None = None
    parameters: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    output_shape: tuple[int, ...] | None = None
    generated: str | None = None
    skipped: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems


def run_model(
    directory: str | Path, *, remote_code: RemoteCode = RemoteCode.REFUSE
) -> FunctionalReport:
    """Build the model of a Hugging Face directory, run it on fixed tokens, and generate a little.

    Runs on the CPU and without network. What is wrong with the checkpoint is in the report; the
    function raises only when there is no such directory or transformers is not installed.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise NotFoundError(
            f"{path}: no config.json, so there is no Hugging Face model to run; give the directory "
            f"of a checkpoint or an export",
            path=path,
        )
    transformers = _transformers()
    loaded, problem = attempt(lambda: _load(path, transformers, remote_code))
    if loaded is None:
        text = f"the model cannot be built: {problem}{_hint(path, remote_code)}"
        return FunctionalReport(directory=str(path), problems=(text,))
    model, info = loaded
    return _Probe(path, model, info, remote_code).report()


def _load(path: Path, transformers: Any, remote_code: RemoteCode) -> tuple[Any, Mapping[str, Any]]:
    options = {
        "ignore_mismatched_sizes": True,  # they are in the loading info, all of them
        "local_files_only": True,
        "output_loading_info": True,
        "trust_remote_code": remote_code is RemoteCode.RUN,
    }
    model, info = _loader(path, transformers).from_pretrained(str(path), **options)
    return model.eval(), info


def _hint(path: Path, remote_code: RemoteCode) -> str:
    if remote_code is RemoteCode.RUN or b'"auto_map"' not in (path / "config.json").read_bytes():
        return ""
    return "; the checkpoint brings its own Python modules, which run only with RemoteCode.RUN"


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as e:
        raise MissingExtraError(
            "running a model needs transformers; pip install 'milepost[hf]'"
        ) from e
    return transformers


def _loader(path: Path, transformers: Any) -> Any:
    """The class that `architectures` names, or the Auto class that fits best."""
    document = json.loads((path / "config.json").read_bytes())
    auto_map = document.get("auto_map") or {}
    for name in document.get("architectures") or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for name in _AUTO_CLASSES:
        if name in auto_map:
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM


class _Probe:
    """One loaded model and what was found out about it."""

    def __init__(
        self, path: Path, model: Any, info: Mapping[str, Any], remote_code: RemoteCode
    ) -> None:
        self._remote_code = remote_code
        self._path = path
        self._model = model
        self._info = info
        self._problems: list[str] = []
        self._skipped: list[str] = []

    def report(self) -> FunctionalReport:
        missing, unexpected, mismatched = (
            self._names(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        for error in self._info.get("error_msgs") or ():
            self._problems.append(f"while loading: {error}")
        shape = self._forward()
        generated = self._generate()
        return FunctionalReport(
            directory=str(self._path),
            architecture=type(self._model).__name__,
            parameters=sum(p.numel() for p in self._model.parameters()),
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
            output_shape=shape,
            generated=generated,
            skipped=tuple(self._skipped),
            problems=tuple(self._problems),
        )

    def _names(self, kind: str) -> tuple[str, ...]:
        """Names that the loader complains about; entries may be (name, shape, shape)."""
        found = self._info.get(kind) or ()
        names = tuple(sorted(n if isinstance(n, str) else str(n[0]) for n in found))
        if names:
            first = ", ".join(names[:5])
            self._problems.append(f"{len(names)} {kind.replace('_', ' ')}: {first}")
        return names

    def _forward(self) -> tuple[int, ...] | None:
        ids = self._token_ids()
        if ids is None:
            self._skipped.append("forward pass: the model takes no token ids")
            return None
        output, problem = attempt(lambda: self._output(ids))
        if output is None:
            self._problems.append(f"forward pass: {problem}")
            return None
        bad = int((~output.isfinite()).sum())
        if bad:
            self._problems.append(f"forward pass: {bad} of {output.numel()} outputs are not finite")
        return tuple(output.shape)

    def _token_ids(self) -> torch.Tensor | None:
        import torch

        embeddings, _ = attempt(self._model.get_input_embeddings)
        weight = getattr(embeddings, "weight", None)
        if weight is None:
            return None
        vocabulary = int(weight.shape[0])
        return (torch.arange(_PROBE_TOKENS) % vocabulary).unsqueeze(0)

    def _output(self, ids: torch.Tensor) -> torch.Tensor:
        import torch

        inputs = {"input_ids": ids}
        if getattr(self._model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        with torch.no_grad():
            output = self._model(**inputs)
        for name in ("logits", "last_hidden_state"):
            if isinstance(getattr(output, name, None), torch.Tensor):
                return output[name]  # type: ignore[no-any-return]
        found = output if isinstance(output, torch.Tensor) else output[0]
        assert isinstance(found, torch.Tensor), "the model's first output is no tensor"
        return found

    def _generate(self) -> str | None:
        can_generate, _ = attempt(lambda: self._model.can_generate())
        if not can_generate:
            return None
        if not any((self._path / name).is_file() for name in _TOKENIZERS):
            self._skipped.append("generation: the directory has no tokenizer")
            return None
        text, problem = attempt(self._continuation)
        if problem is not None:
            self._problems.append(f"generation: {problem}")
        return text

    def _continuation(self) -> str:
        import torch

        transformers = _transformers()
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(self._path),
            local_files_only=True,
            trust_remote_code=self._remote_code is RemoteCode.RUN,
        )
        ids = tokenizer(_PROMPT, return_tensors="pt")["input_ids"].long()
        if ids.shape[-1] == 0:
            ids = self._token_ids()
        settings = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=_NEW_TOKENS, pad_token_id=0
        )
        mask = torch.ones_like(ids)
        ids = self._model.generate(ids, attention_mask=mask, generation_config=settings)
        return str(tokenizer.decode(ids[0], skip_special_tokens=True))
