"""`hf:` names: GGUF files of Hugging Face repositories, fetched and cached by huggingface_hub.

That library knows resuming, mirrors (HF_ENDPOINT), the cache's place (HF_HOME), tokens (HF_TOKEN) and offline mode
(HF_HUB_OFFLINE), and draws its own progress bars on a terminal. Here a name is turned into files, and whatever goes
wrong into a sentence.
"""

from __future__ import annotations

import errno
import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hybrid.errors import BadRequestError, HybridError, UnsupportedError

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^:]+)|:(?P<kind>[\w.-]+))?")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_KIND = re.compile(r"(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*)", re.IGNORECASE)
"""How quantisations are written in file names."""
_SHOWN = 12
RETRIES = 4
TIMEOUT_S = 10.0
"""How long a server may take to list a repository's files."""


def fetch(name: str) -> Path:
    """The local file of `org/repo/file.gguf` or `org/repo[:Q4_K_M]`, fetched if it is not here; the first of shards.

    Raises BadRequestError for a name that is none, or that fits no file or several, HybridError where a file cannot be
    fetched. Ctrl-C passes through; what has arrived by then is kept, and the next call goes on from there.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise BadRequestError(f"hf:{name} is not a model's name; write hf:ORG/REPO/FILE.gguf or hf:ORG/REPO:Q4_K_M.")
    repo = match["repo"]
    hub = _library()
    with _sentences(hub, repo):
        listing = _list(hub, repo)
        wanted = _shards(listing, match["file"]) if match["file"] else _of_kind(listing, match["kind"])
        paths = [_download(hub, repo, file, local=bool(listing.why_local)) for file in wanted]
    return paths[0]


@dataclass(frozen=True)
class _Listing:
    """The GGUF files of a repository, in order."""

    repo: str
    files: list[str]
    why_local: str
    """Why these are only the files that are on this machine; empty where the server named all there are."""

    def refusal(self, what: str) -> BadRequestError:
        """`what` is wrong with them, as a sentence."""
        if self.why_local:
            return BadRequestError(f"The copy of {self.repo} on this machine {what} ({self.why_local}).")
        return BadRequestError(f"The repository {self.repo} {what}.")


def _download(hub: Any, repo: str, file: str, *, local: bool) -> Path:
    """The local path of a file. A connection that breaks is made again, and goes on with what has arrived."""
    broken: tuple[type[Exception], ...] = (RuntimeError, *_unreachable(hub))  # the first: of hf_xet
    for _ in range(RETRIES):
        try:
            return Path(hub.hf_hub_download(repo, file, local_files_only=local))
        except broken as e:
            if isinstance(e, hub.errors.HfHubHTTPError) or _no_space(e):  # an answer, if not the one we want
                raise
    return Path(hub.hf_hub_download(repo, file, local_files_only=local))


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as e:
        raise UnsupportedError("hf: names need another package: pip install huggingface_hub") from e
    return huggingface_hub


def _list(hub: Any, repo: str) -> _Listing:
    """The repository's GGUF files; without an answer of the server's, those in the cache."""
    errors, why = hub.errors, ""
    try:
        found = [file.rfilename for file in hub.HfApi().model_info(repo, timeout=TIMEOUT_S).siblings or ()]
    except errors.HfHubHTTPError as e:
        if e.response.status_code < 500:
            raise
        found, why = _cached(hub, repo, e), f"{hub.constants.ENDPOINT} answers {e.response.status_code}"
    except (OSError, errors.OfflineModeIsEnabled, *_unreachable(hub)) as e:
        found, why = _cached(hub, repo, e), f"{hub.constants.ENDPOINT} cannot be reached"
        if hub.constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE says not to fetch more"
    models = sorted(file for file in found if file.lower().endswith(".gguf") and not _is_extra(file))
    listing = _Listing(repo, models, why)
    if not models:
        raise listing.refusal("has no GGUF files" + ("" if why else "; look for one whose name ends in GGUF"))
    return listing


def _cached(hub: Any, repo: str, reason: Exception) -> list[str]:
    folder = Path(hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        raise reason from None
    found = [str(path.relative_to(snapshot).as_posix()) for path in snapshot.rglob("*") if path.is_file()]
    if not found:
        raise reason
    return found


def _unreachable(hub: Any) -> tuple[type[Exception], ...]:
    """What the library's HTTP client raises where there is no answer, or half of one: requests', in newer releases
    httpx's."""
    error: type[Exception] = hub.errors.HTTPError
    base = error.__base__
    return (error if base is Exception or base is None else base,)


def _is_extra(file: str) -> bool:
    """Whether it accompanies a model: a vision projector, an importance matrix."""
    name = PurePosixPath(file).name.lower()
    return "mmproj" in name or "imatrix" in name


def _shards(listing: _Listing, file: str) -> list[str]:
    """`file`, or all shards of the set it belongs to; `*` and `?` in it stand for what one model's name has there."""
    files = listing.files
    if any(c in file for c in "*?["):
        found = [name for name in files if fnmatch.fnmatchcase(name, file)]
        firsts = [name for name in found if (shard := _SHARD.fullmatch(name)) is None or int(shard["no"]) == 1]
        if len(firsts) > 1:
            raise BadRequestError(f"Several files of {listing.repo} fit {file}: {_listed(firsts)}; name one.")
        file = (firsts or found or [file])[0]
    if file not in files:
        raise listing.refusal(f"has no file {file}; its GGUF files are {_listed(files)}")
    match = _SHARD.fullmatch(file)
    if match is None:
        return [file]
    wanted = [f"{match['stem']}-{i:05d}-of-{match['count']}.gguf" for i in range(1, int(match["count"]) + 1)]
    missing = [name for name in wanted if name not in files]
    if missing:
        raise listing.refusal(f"lacks {_listed(missing)}, a shard of {file}")
    return wanted


def _of_kind(listing: _Listing, kind: str | None) -> list[str]:
    """The files of the one model of quantisation `kind`, or of the only model there is."""
    models: dict[str, list[str]] = defaultdict(list)
    for file in listing.files:
        shard = _SHARD.fullmatch(file)
        models[shard["stem"] if shard else file[: -len(".gguf")]].append(file)
    chosen = list(models)
    if kind is not None:
        exact = [stem for stem in models if _kind_of(stem) == kind.upper()]
        within = re.compile(rf"(?<![A-Z0-9]){re.escape(kind.upper())}(?![A-Z0-9_])")
        chosen = exact or [stem for stem in models if within.search(stem.upper())]
    if len(chosen) == 1:
        return _shards(listing, models[chosen[0]][0])
    kinds = [_kind_of(stem) for stem in models]
    if not chosen:
        raise listing.refusal(f"has no {kind}; it has {_listed(sorted({*kinds} - {''}) or listing.files)}")
    name = f"hf:{listing.repo}"
    if kind is None and len({*kinds} - {""}) == len(models):
        raise listing.refusal(f"has several models: {_listed(sorted(kinds))}; say which: {name}:{kinds[0]}")
    several = [models[stem][0] for stem in chosen]
    raise listing.refusal(f"has several files that fit: {_listed(several)}; name one: {name}/{several[0]}")


def _kind_of(stem: str) -> str:
    """The quantisation a file's name ends in, in capitals; empty where it says none."""
    found = [word for word in re.split(r"[-./]", stem) if _KIND.fullmatch(word)]
    return found[-1].upper() if found else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextmanager
def _sentences(hub: Any, repo: str) -> Iterator[None]:
    """Turn what the library raises into one sentence each."""
    errors, place = hub.errors, hub.constants.ENDPOINT
    try:
        yield
    except HybridError:
        raise
    except errors.GatedRepoError as e:
        raise HybridError(
            f"{repo} is gated: accept its terms at {place}/{repo}, then set HF_TOKEN to a token of that account."
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise BadRequestError(f"There is no repository {repo} at {place}; a private one needs HF_TOKEN.") from e
    except errors.HFValidationError as e:
        raise BadRequestError(f"{repo} is not a repository's name ({e}).") from e
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as e:
        raise _not_here(hub, repo) from e
    except errors.HfHubHTTPError as e:
        status = e.response.status_code
        if status in (401, 403):
            raise HybridError(f"{place} lets nobody read {repo} without a token; set HF_TOKEN.") from e
        raise HybridError(f"{place} answers {status} when asked for {repo}; try again later.") from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(hub, repo) from e
        if e.errno is not None and e.filename is not None:
            raise HybridError(f"{repo} cannot be stored: {e.strerror} ({e.filename}).") from e
        raise _not_here(hub, repo) from e
    except RuntimeError as e:
        if _no_space(e):
            raise _full(hub, repo) from e
        why = str(e).strip().split("\n")[0].rstrip(".") or type(e).__name__
        raise HybridError(f"{repo} could not be fetched from {place}: {why:.160}.") from e
    except _unreachable(hub) as e:
        raise _not_here(hub, repo) from e


def _no_space(error: BaseException) -> bool:
    """Whether hf_xet, which puts everything into words, means a full disk."""
    return isinstance(error, RuntimeError) and f"os error {errno.ENOSPC}" in str(error)


def _full(hub: Any, repo: str) -> HybridError:
    where = hub.constants.HF_HUB_CACHE
    return HybridError(f"The disk that holds {where} is full; {repo} needs more space (see HF_HOME).")


def _not_here(hub: Any, repo: str) -> HybridError:
    if hub.constants.HF_HUB_OFFLINE:
        return HybridError(f"{repo} is not on this machine, and HF_HUB_OFFLINE says not to fetch it.")
    return HybridError(f"{repo} is not on this machine, and {hub.constants.ENDPOINT} cannot be reached.")
