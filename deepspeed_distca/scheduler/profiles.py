# SPDX-License-Identifier: Apache-2.0
"""Stored cost models: what was measured on which device with which kernel, where it lies, and which one to use.

A profile is a JSON file. ``ds_distca profile`` writes them into the user's cache; a few are shipped in the folder
``shipped`` beside this file, under the same names.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import log
from pathlib import Path
from typing import Any

from deepspeed_distca.given import shown
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.strict_json import loads

logger = logging.getLogger(__name__)

#: Of the files; a file of another format is not read.
FORMAT = 1
SHIPPED = Path(__file__).parent / "shipped"
_REMEDY = "`ds_distca profile` measures this device"


class ProfileError(ValueError):
    """A stored cost model that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Setting:
    """What a cost model was measured with, or is wanted for, beside the heads.

    Attributes:
        device: the GPU's name as its driver gives it, or "cpu".
        architecture: "sm90" for compute capability 9.0, or "cpu".
        kernel: name of the attention kernel; None where none fits.
        dtype: "bf16", "fp16" or "fp32", of q, k and v.
    """

    device: str
    architecture: str
    kernel: str | None
    dtype: str


@dataclass(frozen=True)
class Profile:
    """A measured cost model.

    Attributes:
        setting: what it was measured with; the heads are the cost model's.
        cost: the terms.
        about: for people: date, versions, errors of prediction. Nothing depends on it.
    """

    setting: Setting
    cost: CostModel
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "format": FORMAT,
            **asdict(self.setting),
            "cost_model": self.cost.to_dict(),
            "about": dict(self.about),
        }

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """What :meth:`to_dict` gave.

        Raises:
            ProfileError: another format, unknown or missing keys, or values out of range.
        """
        if not isinstance(values, Mapping) or "format" not in values:
            raise ProfileError('not a cost model profile: expected a JSON object with a key "format"')
        if type(values["format"]) is not int or values["format"] != FORMAT:
            given = shown(values["format"])
            raise ProfileError(f"its format is {given}, this version of deepspeed_distca reads {FORMAT}")
        names = tuple(Setting.__dataclass_fields__)
        known = {"format", *names, "cost_model", "about"}
        if set(values) != known:
            raise ProfileError(f"expected the keys {', '.join(sorted(known))}, got {', '.join(sorted(values))}")
        for name in names:
            if not isinstance(values[name], str) or not values[name]:
                raise ProfileError(f"{name} must be a string that is not empty, got {shown(values[name])}")
        if not isinstance(values["about"], Mapping):
            raise ProfileError(f"about must be an object, got {shown(values['about'])}")
        try:
            cost = CostModel.from_dict(values["cost_model"])
        except ValueError as error:
            raise ProfileError(str(error)) from error
        return cls(Setting(*(values[name] for name in names)), cost, values["about"])

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all, and the folders above it.

        Raises:
            OSError: the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path, heads: Heads | None = None) -> Profile:
        """Reads a file.

        Args:
            heads: that its cost model is going to be scaled to.

        Raises:
            ProfileError: it is not there, cannot be read, is no profile, or cannot be scaled to those heads.
        """
        try:
            profile = cls.from_dict(loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ProfileError(f"{path}: {error.strerror or error}") from error
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error
        except ValueError as error:
            raise ProfileError(f"{path}: not valid JSON: {error}") from error
        try:
            profile.cost.for_heads(heads or profile.cost.heads)
        except ValueError as error:
            raise ProfileError(f"{path}: {error}") from error
        return profile


@dataclass(frozen=True)
class Choice:
    """A cost model and where it is from, in words that follow "cost model"."""

    cost: CostModel
    source: str


def choose(
    wanted: Setting, heads: Heads, path: str | Path | None = None, *, folder: Path | None, shipped: Path = SHIPPED
) -> Choice:
    """The cost model for a device, a kernel and heads.

    In this order: the file at `path`; a profile of this device, kernel and dtype in `folder`; a shipped one of the
    device, or of another device of its architecture; the defaults. A profile of other heads is scaled, the nearest
    one is taken. A file in `folder` that cannot be used is passed over with a warning.

    Args:
        path: a file that the user named; used whatever it was measured with.
        folder: the user's cache, :func:`cache_folder`; None for none.

    Raises:
        ProfileError: the file at `path` cannot be used.
    """
    if path is not None:
        profile = Profile.load(Path(path), heads)
        source = f"of {path}, measured on {profile.setting.device} with {profile.setting.kernel}"
        return Choice(profile.cost.for_heads(heads), source + _scaled(profile.cost.heads, heads))
    broken: list[str] = []
    choice = _cached(wanted, heads, folder, broken) or _shipped(wanted, heads, shipped) or _default(heads)
    for problem in broken:
        logger.warning(
            "distca: the stored cost model %s. Used instead: the cost model %s. `ds_distca profile` writes the file "
            "anew; or delete it",
            problem,
            choice.source,
        )
    return choice


def cache_folder() -> Path | None:
    """The folder of the user's profiles: $XDG_CACHE_HOME/deepspeed_distca or ~/.cache/deepspeed_distca. None for a
    user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the specification of that variable: a relative path is to be ignored
        return Path(given, "deepspeed_distca")
    try:
        return Path.home() / ".cache" / "deepspeed_distca"
    except RuntimeError:
        return None


def file_name(setting: Setting, heads: Heads) -> str:
    """The name under which a profile is stored and looked for."""
    value = "" if _dims(heads)[0] == _dims(heads)[1] else f"v{heads.value_dim}"
    return f"{_stem(setting)}-q{heads.query}-kv{heads.key_value}-d{heads.head_dim}{value}-{setting.dtype}.json"


def _cached(wanted: Setting, heads: Heads, folder: Path | None, broken: list[str]) -> Choice | None:
    if folder is None or wanted.kernel is None:
        return None
    exact = folder / file_name(wanted, heads)
    others = sorted(folder.glob(f"{_stem(wanted)}-*-{wanted.dtype}.json"))
    for paths in ([exact] if os.path.exists(exact) else [], [path for path in others if path != exact]):
        found = []
        for profile, path in _load_all(paths, heads, broken):
            given = profile.setting
            if (given.device, given.kernel, given.dtype) == (wanted.device, wanted.kernel, wanted.dtype):
                found.append((profile, path))
            else:
                broken.append(
                    f"{path}: its name says {wanted.device}, but it was measured on {given.device} with "
                    f"{given.kernel} in {given.dtype}"
                )
        if found:
            profile, path = _nearest(found, heads)
            source = f"measured on this device ({path})"
            return Choice(profile.cost.for_heads(heads), source + _scaled(profile.cost.heads, heads))
    return None


def _shipped(wanted: Setting, heads: Heads, folder: Path) -> Choice | None:
    found = [
        (profile, path)
        for profile, path in _load_all(sorted(folder.glob("*.json")), heads, None)
        if profile.setting.kernel == wanted.kernel and profile.setting.dtype == wanted.dtype
    ]
    own = [x for x in found if x[0].setting.device == wanted.device]
    related = [x for x in found if x[0].setting.architecture == wanted.architecture]
    if not (own or related):
        return None
    profile, _ = _nearest(own or related, heads)
    source = f"shipped for {profile.setting.device}"
    if not own:
        source += f", used for {wanted.device} ({_REMEDY})"
    return Choice(profile.cost.for_heads(heads), source + _scaled(profile.cost.heads, heads))


def _default(heads: Heads) -> Choice:
    return Choice(CostModel.fitted(heads), f"of flash_attn_4 on an H200 by default ({_REMEDY})")


def _load_all(paths: Iterable[Path], heads: Heads, broken: list[str] | None) -> Iterable[tuple[Profile, Path]]:
    """The profiles that can be read and scaled to these heads; what is wrong with the others goes to `broken`, or is
    raised where that is None."""
    for path in paths:
        try:
            yield Profile.load(path, heads), path
        except ProfileError as error:
            if broken is None:
                raise
            broken.append(str(error))


def _nearest(found: list[tuple[Profile, Path]], heads: Heads) -> tuple[Profile, Path]:
    """The profile whose heads are most like these: head dimensions first, which decide the kernel's tiles."""

    def distance(entry: tuple[Profile, Path]) -> tuple[float, ...]:
        other = entry[0].cost.heads
        dims = sum(abs(log(a / b)) for a, b in zip(_dims(other), _dims(heads), strict=True))
        return dims, abs(log(other.query / heads.query)), abs(log(other.key_value / heads.key_value))

    return min(found, key=distance)  # of equals the first by name


def _dims(heads: Heads) -> tuple[int, int]:
    return heads.head_dim, heads.value_dim or heads.head_dim


def _shape(heads: Heads) -> tuple[int, ...]:
    return heads.query, heads.key_value, *_dims(heads)


def _scaled(measured: Heads, heads: Heads) -> str:
    if _shape(measured) == _shape(heads):
        return ""
    dims = "/".join(map(str, dict.fromkeys(_dims(measured))))
    return f", scaled from {measured.query}/{measured.key_value} heads of {dims}"


def _stem(setting: Setting) -> str:
    return f"{re.sub('[^a-z0-9]+', '_', setting.device.lower()).strip('_')}-{setting.kernel}"
