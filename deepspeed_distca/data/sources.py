# SPDX-License-Identifier: Apache-2.0
"""Documents for the global loader, out of what people have: datasets, sequences, streams, texts.

Two kinds: :class:`IndexedDocuments` know every length beforehand and give any document; :class:`StreamedDocuments`
only come one after another. Every rank must be given the same documents in the same order.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from deepspeed_distca.compat import check
from deepspeed_distca.compat.datasets import is_split_by_node, row_numbers
from deepspeed_distca.data.documents import KNOWN_KEYS, Document, read_feature

logger = logging.getLogger(__name__)

_READ = ("input_ids", "labels", "attention_mask")
_reported: set[str] = set()  # keys and columns of which a warning has said that they are ignored


class IndexedDocuments:
    """Documents of a sequence: of token lists, arrays, tensors, or mappings with "input_ids" and perhaps "labels".

    Args:
        data: anything with a length and items.
        lengths: int64 [num_documents], tokens of each; where they are not known, all items are read for them.
    """

    def __init__(self, data: Sequence[Any], lengths: np.ndarray | None = None) -> None:
        self.data = data
        if lengths is None:
            found = (len(_document(data[i], f"document {i}").input_ids) for i in range(len(data)))
            lengths = np.fromiter(found, np.int64, len(data))
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        """One document.

        Raises:
            TypeError, ValueError: it cannot be read, or has another length than was read before.
        """
        document = _document(self._item(index), f"document {index}")
        if len(document.input_ids) != self.lengths[index]:
            raise ValueError(
                f"document {index} has {len(document.input_ids)} tokens where {self.lengths[index]} were expected; "
                "documents must not change, and their input_ids must not be padded"
            )
        return document

    def _item(self, index: int) -> Any:
        return self.data[index]


class ArrowDocuments(IndexedDocuments):
    """Documents of a ``datasets.Dataset``. Lengths come from the offsets of its Arrow lists, through its selected or
    shuffled indices: no token is read for them.

    Raises:
        ValueError: no column "input_ids", columns of rows that are packed already, or a row whose labels or
            attention_mask have another length than its input_ids; on every rank, before any of them reads the row.
        TypeError: a column that does not hold lists of integers.
    """

    def __init__(self, data: Any) -> None:
        columns = data.column_names
        if "input_ids" not in columns:
            raise ValueError(
                f'the dataset has the columns {columns}, but no "input_ids"; for texts use '
                "deepspeed_distca.data.tokenize"
            )
        packed = sorted(KNOWN_KEYS.intersection(columns) - set(_READ) | {"seq_lengths"}.intersection(columns))
        if packed:
            raise ValueError(
                f"the dataset has the columns {packed}: its rows are packed or shifted already; give whole documents, "
                f"or remove the columns if each row is one document"
            )
        _report_ignored(columns)
        read = [name for name in _READ if name in columns]
        lengths, *others = (_arrow_lengths(data, name) for name in read)
        for name, found in zip(read[1:], others, strict=True):
            differ = np.flatnonzero(found != lengths)
            if len(differ):
                row = int(differ[0])
                raise ValueError(
                    f"document {row}: {name} has {found[row]} values, but input_ids has {lengths[row]} "
                    f"({len(differ)} of {len(lengths)} documents differ); they must be of one length"
                )
        super().__init__(data.with_format("numpy", columns=read), lengths)

    def _item(self, index: int) -> dict[str, Any]:
        return {name: () if values is None else values for name, values in self.data[index].items()}


def _arrow_lengths(data: Any, name: str) -> np.ndarray:
    """Values in each row of a column of lists, int64, in the dataset's own order over the rows of its table."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = data.data.column(name)
    lists = hasattr(column.type, "value_type") and not isinstance(column.type, pa.BaseExtensionType)
    if not lists or not pa.types.is_integer(column.type.value_type):
        raise TypeError(f"column {name!r} of the dataset must hold lists of integers, but holds {column.type}")
    check("datasets")
    rows = row_numbers(data)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    return lengths if rows is None else lengths[rows.to_numpy()]


class StreamedDocuments:
    """Documents of an iterable of the items that :class:`IndexedDocuments` takes, read anew in each epoch.

    Args:
        data: an iterable, whose ``set_epoch(epoch)`` is called if there is one, or a function that returns an
            iterable. An iterator can be read only once.
    """

    def __init__(self, data: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.data = data
        self._exhausted = False

    @property
    def is_iterator(self) -> bool:
        """It can be read only once, and not by another process."""
        return isinstance(self.data, Iterator)

    def read(self, epoch: int) -> Iterator[Document]:
        """The documents of an epoch, in order.

        Raises:
            ValueError: an iterator that was read before.
        """
        data = self.data
        if self.is_iterator:
            if self._exhausted:
                raise ValueError(
                    "the documents come from an iterator, which can be read only once; for more epochs, or to resume, "
                    "give something that can be iterated anew, or a function that returns an iterator"
                )
            self._exhausted = True
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        items = data() if callable(data) and not hasattr(data, "__iter__") else data
        for index, item in enumerate(items):
            yield _document(item, f"document {index} of the stream")


class TokenizedStream:
    """Token ids of the texts of an iterable, tokenized as they come; can be iterated anew if the texts can."""

    def __init__(self, texts: Iterable[Any], encode: Callable[[list[Any]], list[np.ndarray]]) -> None:
        self._texts, self._encode = texts, encode
        if isinstance(texts, Iterator):
            raise TypeError(
                "the texts come from an iterator, which can be read only once; give something that can be iterated "
                "anew"
            )

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._texts, "set_epoch"):
            self._texts.set_epoch(epoch)

    def __iter__(self) -> Iterator[np.ndarray]:
        return _in_batches(self._texts, 64, self._encode)


def read_source(data: Any) -> IndexedDocuments | StreamedDocuments:
    """Documents of a ``datasets.Dataset`` or ``IterableDataset``, of a sequence (or any dataset with a length and
    items), of an iterable, or of a function that returns one.

    Raises:
        TypeError: none of these, or a dictionary of splits.
        ValueError: a stream of which each rank has another part.
    """
    if isinstance(data, Mapping):
        raise TypeError(
            f"expected documents, got a {type(data).__name__} with the keys {[str(key) for key in data][:8]}; choose "
            "one of them"
        )
    if _is_dataset(data):
        # A transform makes the items; only they know the lengths.
        return IndexedDocuments(data) if data.format["type"] == "custom" else ArrowDocuments(data)
    if not isinstance(data, str | bytes):
        if _has_items(data):
            return IndexedDocuments(data)
        if is_split_by_node(data):
            raise ValueError(
                "the stream was divided among ranks (split_dataset_by_node); every rank must read all of it, as the "
                "loader divides documents among ranks itself: give the stream from before"
            )
        if hasattr(data, "__iter__") or callable(data):
            return StreamedDocuments(data)
    raise TypeError(
        f"expected a dataset, a sequence or an iterable of documents, got {type(data).__name__}; texts become "
        "documents with deepspeed_distca.data.tokenize"
    )


def tokenize(
    texts: Any,
    tokenizer: Callable[..., Mapping[str, Any]],
    *,
    text_column: str = "text",
    append_eos: bool = True,
    num_proc: int | None = None,
) -> Any:
    """Documents for the loader from texts.

    Args:
        texts: a ``datasets.Dataset`` (tokenized by its ``map``, which caches), a sequence (tokenized now), or an
            ``IterableDataset`` or other iterable (tokenized as it is read); of strings, or of mappings with
            `text_column`.
        tokenizer: of transformers, or any function from a list of texts to a mapping with "input_ids".
        append_eos: end each document with the tokenizer's ``eos_token_id``, if it has one and the document does not
            end with it.
        num_proc: processes of ``Dataset.map``.

    Raises:
        TypeError: a single string, or an item that is neither a string nor a mapping with `text_column`.
    """
    if isinstance(texts, str | bytes):
        raise TypeError("expected many texts, got one; put it into a list")
    encode = _Encoder(tokenizer, text_column, append_eos)
    if _is_dataset(texts):
        if text_column not in texts.column_names:
            raise TypeError(f"the dataset has the columns {texts.column_names}, but no {text_column!r}")
        return texts.map(
            encode.columns,
            batched=True,
            input_columns=[text_column],
            remove_columns=texts.column_names,
            num_proc=num_proc,
        )
    if not _has_items(texts):
        return TokenizedStream(texts, encode)
    return list(_in_batches((texts[i] for i in range(len(texts))), 1000, encode))


class _Encoder:
    """Texts to token ids; an object and not a closure, so that it can go to other processes."""

    def __init__(self, tokenizer: Callable[..., Mapping[str, Any]], text_column: str, append_eos: bool) -> None:
        self._tokenizer, self._text_column = tokenizer, text_column
        self._eos = getattr(tokenizer, "eos_token_id", None) if append_eos else None

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        texts = [item.get(self._text_column) if isinstance(item, Mapping) else item for item in items]
        for item, text in zip(items, texts, strict=True):
            if not isinstance(text, str):
                raise TypeError(f"expected a string or a mapping with {self._text_column!r}, got {str(item)[:80]!r}")
        # Documents longer than the model's context are what the loader is for: no warning about them.
        quiet = {"verbose": False} if hasattr(self._tokenizer, "model_max_length") else {}
        found = [np.asarray(ids, dtype=np.int64) for ids in self._tokenizer(texts, **quiet)["input_ids"]]
        if self._eos is None:
            return found
        return [ids if ids[-1:].tolist() == [self._eos] else np.append(ids, self._eos) for ids in found]

    def columns(self, texts: list[str]) -> dict[str, list[np.ndarray]]:
        """For ``Dataset.map``."""
        return {"input_ids": self(texts)}


def _in_batches(
    items: Iterable[Any], size: int, encode: Callable[[list[Any]], list[np.ndarray]]
) -> Iterator[np.ndarray]:
    items = iter(items)
    while batch := list(islice(items, size)):
        yield from encode(batch)


def _report_ignored(keys: Iterable[Any]) -> None:
    """A warning, once for each key: a mask of what has a target may be among them, without which all has one."""
    unknown = {str(key) for key in keys if key not in KNOWN_KEYS} - _reported
    if unknown:
        _reported.update(unknown)
        logger.warning(
            "global loader: these columns of the documents are ignored: %s; tokens without a target have label -100",
            ", ".join(sorted(unknown)),
        )


def _is_dataset(data: Any) -> bool:
    """A ``datasets.Dataset``. The library is optional and slow to import; whoever has a dataset has imported it."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, library.Dataset)


def _has_items(data: Any) -> bool:
    """It has a length and items, and is no stream."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def _document(item: Any, where: str) -> Document:
    if isinstance(item, Mapping) and "seq_lengths" in item:
        raise ValueError(f"{where}: seq_lengths says that the row is packed already; give each document by itself")
    if isinstance(item, Mapping):
        _report_ignored(item)
        feature = {k: item[k] for k in KNOWN_KEYS if k in item}
    else:
        feature = {"input_ids": item}
    try:
        found = read_feature(feature)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    if len(found) > 1:
        raise ValueError(f"{where}: the row holds {len(found)} packed documents; give each document by itself")
    return found[0] if found else Document(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
