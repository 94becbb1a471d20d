# SPDX-License-Identifier: Apache-2.0
"""Documents for the global loader from datasets, sequences, streams and texts."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Array2D, Dataset, DatasetDict, Features, IterableDataset, List, Value, concatenate_datasets
from datasets.distributed import split_dataset_by_node

from deepspeed_distca.data.global_loader import GlobalPackedLoader
from deepspeed_distca.data.sources import ArrowDocuments, IndexedDocuments, StreamedDocuments, read_source, tokenize


def rows(count: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, size=n).tolist() for n in rng.integers(0, 30, size=count)]


def check(source: IndexedDocuments, expected: list[list[int]]) -> None:
    assert source.lengths.tolist() == [len(r) for r in expected] and source.lengths.dtype == np.int64
    for index in np.random.default_rng(0).permutation(len(expected)).tolist():
        document = source[index]
        assert document.input_ids.tolist() == document.labels.tolist() == expected[index]


def test_lengths_and_tokens_of_arrow_datasets(tmp_path) -> None:
    ids = rows()
    dataset = Dataset.from_dict({"input_ids": ids, "text": ["x"] * len(ids)})
    order = np.random.default_rng(1).permutation(len(ids)).tolist()
    narrow = dataset.cast(Features({"input_ids": List(Value("int32")), "text": Value("string")}))
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    several_chunks = concatenate_datasets([dataset.select(range(7)), dataset.select(range(7, 40))])
    cases = {
        "plain": (dataset, ids),
        "int32": (narrow, ids),
        "on disk": (Dataset.load_from_disk(str(tmp_path / "saved")), ids),
        "slice": (dataset.select(range(11, 29)), ids[11:29]),
        "indices": (dataset.select(order[:17]), [ids[i] for i in order[:17]]),
        "slice of indices": (dataset.select(order).select(range(5, 20)), [ids[i] for i in order[5:20]]),
        "chunks": (several_chunks, ids),
        "indices over chunks": (several_chunks.select(order), [ids[i] for i in order]),
        "shard": (dataset.shard(4, 1), [ids[i] for i in range(10, 20)]),
        "filtered": (dataset.filter(lambda r: len(r["input_ids"]) > 9), [r for r in ids if len(r) > 9]),
        "torch format": (dataset.with_format("torch"), ids),
        "no rows": (dataset.select([]), []),
    }
    shuffled = dataset.shuffle(seed=3)
    cases["shuffled"] = shuffled, [r["input_ids"] for r in shuffled]
    for name, (data, expected) in cases.items():
        source = read_source(data)
        assert type(source) is ArrowDocuments, name
        check(source, expected)
        check(pickle.loads(pickle.dumps(source)), expected)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16(), 3)])
def test_arrow_list_types(kind) -> None:
    ids = [[1, 2, 3], [4, 5, 6], None, [7, 8, 9], [10, 11, 12]]
    table = pa.table({"input_ids": pa.chunked_array([pa.array(ids[:2], kind), pa.array(ids, kind).slice(2)])})
    check(read_source(Dataset(table)), [[] if r is None else r for r in ids])


@pytest.mark.parametrize("column", ["labels", "attention_mask"])
def test_columns_of_other_lengths_are_refused_before_a_row_is_read(column) -> None:
    ids = [[1, 2, 3], [4, 5], [6], [7, 8]]
    for other in ([[1, 1, 1], [1, 1], [1, 1], [1, 1]], [[1, 1, 1], [1, 1], None, [1, 1]]):
        dataset = Dataset.from_dict({"input_ids": ids, column: other})
        read_source(dataset.select([0, 3, 1]))  # the row that differs is not among them
        with pytest.raises(ValueError, match=rf"document 1: {column} has [02] values, but input_ids has 1 \(1 of 3"):
            read_source(dataset.select([3, 2, 0]))


def test_arrow_lengths_are_not_read_from_rows(monkeypatch) -> None:
    dataset = Dataset.from_dict({"input_ids": rows()}).select(range(3, 30))

    def fail(*_):
        raise AssertionError("a row was read")

    for name in ("__getitem__", "__iter__", "__getitems__"):
        monkeypatch.setattr(Dataset, name, fail)
    assert len(read_source(dataset).lengths) == 27


def test_labels_and_masks() -> None:
    ids = [[1, 2, 3], [4, 5]]
    labels = [[-100, 2, 3], [4, -100]]
    dataset = Dataset.from_dict({"input_ids": ids, "labels": labels, "attention_mask": [[1, 1, 1], [1, 1]]})
    for source in (read_source(dataset), read_source(list(dataset))):
        assert [source[i].labels.tolist() for i in range(2)] == labels
    padded = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1, 1, 0], [1, 1]]})
    with pytest.raises(ValueError, match="document 0 has 2 tokens where 3 were expected.*must not be padded"):
        read_source(padded)[0]
    assert read_source(list(padded)).lengths.tolist() == [2, 2]  # where rows are read anyway, padding is taken off


def test_transforms_and_other_sequences() -> None:
    ids = rows()
    doubled = Dataset.from_dict({"input_ids": ids}).with_transform(
        lambda batch: {"input_ids": [r + r for r in batch["input_ids"]]}
    )
    check(read_source(doubled), [r + r for r in ids])
    check(read_source([torch.tensor(r, dtype=torch.int64) for r in ids]), ids)
    check(read_source(tuple({"input_ids": np.array(r, dtype=np.int32)} for r in ids)), ids)

    class Map(torch.utils.data.Dataset):
        def __len__(self):
            return len(ids)

        def __getitem__(self, index):
            return {"input_ids": ids[index], "source": "here"}

    check(read_source(Map()), ids)


def test_streams() -> None:
    ids = rows()
    seen = []

    class Stream(torch.utils.data.IterableDataset):
        def set_epoch(self, epoch):
            seen.append(epoch)

        def __iter__(self):
            return iter(ids)

    hugging_face = IterableDataset.from_generator(lambda: ({"input_ids": r} for r in ids))
    for data in (Stream(), hugging_face, lambda: iter(ids), (r for r in ids)):
        source = read_source(data)
        assert isinstance(source, StreamedDocuments)
        assert [d.input_ids.tolist() for d in source.read(4)] == ids
    assert seen == [4]
    with pytest.raises(ValueError, match="read only once.*function that returns an iterator"):
        list(source.read(5))
    with pytest.raises(ValueError, match="cannot be read by a worker"):
        GlobalPackedLoader(iter(ids), 8, num_workers=1)
    assert GlobalPackedLoader(iter(ids), 8, num_workers=0).rank == 0
    with pytest.raises(TypeError, match="not known beforehand"):
        len(GlobalPackedLoader(Stream(), 8))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_iterable_datasets_are_read_whole_by_any_number_of_workers(workers: int) -> None:
    # A worker of its own would read only some shards of such a dataset.
    ids = [r for r in rows(60) if r]

    def shards(numbers):
        for n in numbers:
            yield from ({"input_ids": r} for r in ids[n::4])

    dataset = IterableDataset.from_generator(shards, gen_kwargs={"numbers": [0, 1, 2, 3]})
    in_order = [r for n in range(4) for r in ids[n::4]]
    options = dict(rank=0, num_ranks=1, shuffle=False, fill="whole", num_workers=workers)
    for data, expected in ((dataset, in_order), (dataset.shuffle(seed=1, buffer_size=10), None)):
        loader = GlobalPackedLoader(data, 64, **options)
        for _ in range(2):  # epochs
            found = []
            for batch in loader:
                flat = batch["input_ids"][0].tolist()
                for _, _, length in batch["layout"].rank(0):
                    found.append(flat[:length])
                    del flat[:length]
            assert sorted(found) == sorted(ids)
            if expected:
                assert sum(a == b for a, b in zip(found, expected, strict=True)) > 5


def toy_tokenizer(texts: list[str]) -> dict:
    return {"input_ids": [[ord(c) for c in text] for text in texts]}


def test_texts() -> None:
    texts = ["ab", "", "c" * 70, "defg"]
    expected = [[ord(c) for c in text] for text in texts]

    class WithEos(SimpleNamespace):
        def __call__(self, texts, **options):
            assert options == {"verbose": False}  # no warnings about long documents
            return toy_tokenizer(texts)

    ended = [[*ids, 103] if ids[-1:] != [103] else ids for ids in expected]  # 103: g
    for tokenizer, result in ((toy_tokenizer, expected), (WithEos(eos_token_id=103, model_max_length=8), ended)):
        dataset = Dataset.from_dict({"text": texts, "id": range(4)})
        stream = IterableDataset.from_generator(lambda: ({"text": t, "id": 0} for t in texts))
        tokenized = tokenize(dataset, tokenizer)
        assert tokenized.column_names == ["input_ids"] and type(read_source(tokenized)) is ArrowDocuments
        check(read_source(tokenized), result)
        check(read_source(tokenize(texts, tokenizer)), result)
        check(read_source(tokenize([{"body": t} for t in texts], tokenizer, text_column="body")), result)
        streamed = read_source(tokenize(stream, tokenizer))
        for epoch in range(2):
            assert [d.input_ids.tolist() for d in streamed.read(epoch)] == result
    plain = tokenize(texts, WithEos(eos_token_id=103, model_max_length=8), append_eos=False)
    assert [ids.tolist() for ids in plain] == expected
    for wrong in ("one text", [3], [{"input_ids": [1]}], (t for t in texts)):
        with pytest.raises(TypeError, match="many texts|expected a string|read only once"):
            tokenize(wrong, toy_tokenizer)
    with pytest.raises(TypeError, match="no 'text'"):
        tokenize(Dataset.from_dict({"body": texts}), toy_tokenizer)


def test_what_cannot_be_read_is_refused() -> None:
    stream = Dataset.from_dict({"input_ids": [[1, 2], [3]]}).to_iterable_dataset(num_shards=2)
    with pytest.raises(ValueError, match="divided among ranks .*from before"):
        read_source(split_dataset_by_node(stream, 0, 2))
    square = Dataset.from_dict({"input_ids": [[[1, 2]]]}, features=Features({"input_ids": Array2D((1, 2), "int32")}))
    with pytest.raises(TypeError, match="must hold lists of integers, but holds .*Array2D"):
        read_source(square)
    good = Dataset.from_dict({"input_ids": [[1, 2]]})
    for data, word in (
        (DatasetDict(train=good), r"keys \['train'\]; choose one"),
        ({"input_ids": [[1]]}, "choose one"),
        ("text", "tokenize"),
        (5, "expected a dataset"),
        (Dataset.from_dict({"input_ids": [["a"]]}), "lists of integers"),
        (Dataset.from_dict({"input_ids": [1, 2]}), "lists of integers"),
    ):
        with pytest.raises(TypeError, match=word):
            read_source(data)
    for data, word in (
        (["text"], "document 0: .*must hold integers"),
        (Dataset.from_dict({"text": ["a"]}), 'no "input_ids".*tokenize'),
        (Dataset.from_dict({"input_ids": [[1, 2]], "position_ids": [[0, 0]]}), "position_ids.*packed"),
        (Dataset.from_dict({"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]}), "seq_lengths.*packed"),
        ([{"input_ids": [1, 2], "position_ids": [0, 0]}], "document 0: the row holds 2 packed documents"),
        ([{"input_ids": [1, 2], "seq_lengths": [1, 1]}], "document 0: seq_lengths.*packed"),
    ):
        with pytest.raises(ValueError, match=word):
            read_source(data)


def test_columns_that_are_ignored_are_named_once(caplog) -> None:
    rows = [{"input_ids": [1, 2], "a_mask": [0, 1]}]
    for _ in range(2):
        read_source(rows)
        read_source(Dataset.from_list([{**rows[0], "a_source": "web"}]))
    assert [r.message.split(": ")[-1].split(";")[0] for r in caplog.records] == ["a_mask", "a_source"]


def test_documents_that_change_are_noticed() -> None:
    data = [[1, 2, 3]]
    source = read_source(data)
    data[0] = [1, 2]
    with pytest.raises(ValueError, match="has 2 tokens where 3 were expected"):
        source[0]
